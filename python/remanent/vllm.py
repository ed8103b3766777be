"""Alias of `remanent.integrations.vllm`. An import of this module returns that module."""

import sys

from remanent.integrations import vllm
from remanent.integrations.vllm import *

sys.modules[__name__] = vllm
