# configs/olmo2_1b.py     the shape of OLMo-2-0425-1B, the smallest of OLMo 2 (arXiv 2501.00656)
#
#   python data.py fineweb10B --shards=103
#   torchrun --nproc_per_node=8 train.py configs/tetrajet_full.py configs/olmo2_1b.py --seed=1
#
# TetraJet-v2 ends at 370M. Model, batch, peak rate, warm-up and the floor of the cosine are those of the
# released config OLMo2-1B-stage1.yaml. That trains on 4T tokens in 100,278 ids; length, data and all that is
# about FP4 are chosen here, in the manner of olmo2_370m.py. 1,074M parameters are in block linears.

data = "data/fineweb10B"    # 10B tokens, so this run reads them 10 times; 50,257 ids

n_layer = 16
d_model = 2048              # a multiple of 128, as all widths here: they split into whole outer blocks
n_head = 16                 # 128 wide each
d_ff = 8192                 # released as mlp_ratio 8, which counts gate and up together
seq_len = 4096
vocab_size = 50_304         # GPT-2's ids, rounded up to a multiple of 128

steps = 50_000              # 105B tokens, about 100 for each weight of the blocks: our choice
batch_tokens = 2_097_152    # 512 sequences, as released
micro_batch = 8             # sequences: 30 GB on an H200 (results/bench_h200), and by a count 10 more while
recompute = True            # OsciReset tracks all weights; 20 GB are weights, gradients and Adam's moments
lr = 4e-4
warmup = 4_000 / steps      # 8.39B tokens, as released
decay_end = 1.0             # the released cosine would end at 5T tokens, and is cut off at 4T
lr_final = 0.1

outlier_start = 0.01        # as TetraJet-v2's paper says
outlier_window = 50 / steps
osci_start = 34_000 / steps    # where the rate has fallen to 1.37e-4, a third of its peak, as at 70M
osci_period = 400 / steps
osci_window = 50 / steps

eval_every = 500
eval_tokens = 10_485_760    # 2,560 sequences
save_every = 500
