"""Alias of `remanent.integrations.torchtitan`: importing it returns that module."""

import sys

from remanent.integrations import torchtitan
from remanent.integrations.torchtitan import *

sys.modules[__name__] = torchtitan
