"""Alias of `remanent.integrations.torch_checkpointing`. Importing this module returns that one."""

import sys

from remanent.integrations import torch_checkpointing
from remanent.integrations.torch_checkpointing import *

sys.modules[__name__] = torch_checkpointing
