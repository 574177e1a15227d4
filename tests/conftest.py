import torch

torch.set_num_threads(1)  # tests run side by side; one thread each also makes sums reproducible
