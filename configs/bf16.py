# configs/bf16.py     nothing is rounded to FP4: the run that every other one is measured against
#
#   python train.py configs/bf16.py --seed=1

recipe = "bf16"
