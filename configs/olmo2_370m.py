# configs/olmo2_370m.py     the largest model of TetraJet-v2 (arXiv 2510.27527), by its released configs
#
#   python data.py fineweb10B --shards=103
#   python train.py configs/tetrajet_full.py configs/olmo2_370m.py --seed=1
#
# The paper trains on the OLMo-2 mix with a tokenizer of 100,278 ids; here it is FineWeb in GPT-2's 50,257. So
# losses do not compare with the paper's, only gaps between recipes. 268M parameters are in block linears.

data = "data/fineweb10B"    # 10B tokens, so this run reads them 21 times

n_layer = 16
d_model = 1024              # a multiple of 128, as all widths here: they split into whole outer blocks
n_head = 16                 # 64 wide each
d_ff = 4096
seq_len = 4096
vocab_size = 50_304         # GPT-2's ids, rounded up to a multiple of 128

steps = 50_500              # 211.8B tokens
batch_tokens = 4_194_304    # 1,024 sequences
micro_batch = 8             # sequences: 45 GB on an H200, compiled; by a count of what autograd keeps, 100
lr = 3e-4
warmup = 2_000 / steps      # 8.39B tokens
decay_end = 200e9 / (steps * batch_tokens)    # the cosine ends at 200B tokens; from there the rate stays
lr_final = 0.1

outlier_start = 0.01        # as the paper says, and here the released configs agree: step 501 of 50,500
outlier_window = 50 / steps
osci_start = 35_000 / steps    # where the rate has fallen to 7.8e-5, a quarter of its peak
osci_period = 400 / steps
osci_window = 50 / steps

eval_every = 500
eval_tokens = 10_485_760    # 2,560 sequences
save_every = 500
