"""Alias of `remanent.integrations.torch_checkpointing`. An import of this module returns that module."""

import sys

from remanent.integrations import torch_checkpointing
from remanent.integrations.torch_checkpointing import *

sys.modules[__name__] = torch_checkpointing
