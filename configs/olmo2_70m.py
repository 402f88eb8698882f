# configs/olmo2_70m.py     the smallest model of TetraJet-v2 (arXiv 2510.27527), by its released configs
#
#   python data.py fineweb10B --shards=103
#   python train.py configs/tetrajet_full.py configs/olmo2_70m.py --seed=1
#
# The paper trains on the OLMo-2 mix with a tokenizer of 100,278 ids; here it is FineWeb in GPT-2's 50,257. So
# losses do not compare with the paper's, only gaps between recipes. 21.0M parameters are in block linears.

data = "data/fineweb10B"    # 10B tokens, so this run reads them 5 times

n_layer = 8
d_model = 512               # a multiple of 128, as all widths here: they split into whole outer blocks
n_head = 8                  # 64 wide each
d_ff = 1024
seq_len = 4096
vocab_size = 50_304         # GPT-2's ids, rounded up to a multiple of 128

steps = 12_505              # 52.4B tokens
batch_tokens = 4_194_304    # 1,024 sequences
micro_batch = 8             # sequences: 16 GB on an H200, compiled; by a count of what autograd keeps, 40
lr = 4e-4
warmup = 238 / steps        # 1B tokens
decay_end = 50e9 / (steps * batch_tokens)    # the cosine ends at 50B tokens; from there the rate stays
lr_final = 0.1

outlier_start = 0.01        # as the paper says; the released configs start at step 501, which is 4% here
outlier_window = 50 / steps
osci_start = 8_000 / steps  # where the rate has fallen to 1.31e-4, a third of its peak
osci_period = 200 / steps
osci_window = 50 / steps

eval_every = 500
eval_tokens = 10_485_760    # 2,560 sequences
save_every = 500
