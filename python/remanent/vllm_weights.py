"""Alias of `remanent.integrations.vllm_weights`. An import of this module returns that module."""

import sys

from remanent.integrations import vllm_weights
from remanent.integrations.vllm_weights import *

sys.modules[__name__] = vllm_weights
