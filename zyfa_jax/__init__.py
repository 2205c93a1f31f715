"""Prefill attention for JAX in FP8 and BF16."""

from pkgutil import extend_path as _extend_path

# A checkout in the working directory finds the extension of the installed package.
__path__ = _extend_path(__path__, __name__)

from . import parallel as parallel
from ._attention import attention as attention
from ._ffi import Backend as Backend
from ._ffi import backends as backends
from ._gradient import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from ._primitive import export_safety_checks as export_safety_checks
from ._quantize import Quantized as Quantized
from ._quantize import quantize as quantize
from ._quantize import quantize_qkv as quantize_qkv

__version__ = "0.1.0"
