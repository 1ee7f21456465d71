"""Compare a checkpoint with the model that transformers loads: python same_logits.py ROOT MODEL"""

import sys

import torch
from train import GPT
from transformers import AutoModelForCausalLM

import asyncckpt

ours, theirs = GPT().eval(), AutoModelForCausalLM.from_pretrained(sys.argv[2])
with asyncckpt.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.load({"model": ours})
prompt = torch.tensor([list(b"def __init__(self, ")])
torch.testing.assert_close(ours(prompt), theirs(prompt).logits)
print(f"{type(theirs).__name__} gives the same logits")
