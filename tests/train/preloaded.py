"""Imported by the server of forks: what each rank of `tests.train.ranks` would otherwise do for itself."""

import cv2
import matplotlib.backends.backend_agg  # noqa: F401
import numpy as np
import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # torch imports both at the first backward pass, for seconds
import torch.utils.tensorboard  # noqa: F401

from peclr_dali import cli  # noqa: F401
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.train import finetune, pretrain  # noqa: F401

check_image(cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1])  # loads what Numba has compiled; starts no thread
