"""Alias of `remanent.integrations.torchtitan`. Importing this module returns that one."""

import sys

from remanent.integrations import torchtitan
from remanent.integrations.torchtitan import *

sys.modules[__name__] = torchtitan
