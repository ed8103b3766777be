"""Alias of `remanent.integrations.vllm`. Importing this module returns that one."""

import sys

from remanent.integrations import vllm
from remanent.integrations.vllm import *

sys.modules[__name__] = vllm
