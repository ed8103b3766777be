"""Alias of `remanent.integrations.vllm_weights`. Importing this module returns that one."""

import sys

from remanent.integrations import vllm_weights
from remanent.integrations.vllm_weights import *

sys.modules[__name__] = vllm_weights
