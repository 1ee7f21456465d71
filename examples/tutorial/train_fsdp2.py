"""The same training on several ranks: torchrun --nproc-per-node 2 train_fsdp2.py ROOT"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train import DEVICE, GPT, train

dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)  # all ranks begin with the same weights
model = GPT().to(DEVICE)
mesh = init_device_mesh(DEVICE, (ranks,))
for layer in [*model.transformer["h"].children(), model]:
    fully_shard(layer, mesh=mesh)
train(sys.argv[1], model, rank, ranks)
dist.destroy_process_group()
