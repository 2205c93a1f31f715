"""Prefill of Mistral-7B, Qwen3 and DeepSeek-V2 with zyfa_jax's attention, in Flax NNX.

`python -m examples.models FOLDER` runs a model from Hugging Face's files. To read the
code: `config` says what a model is made of, `decoder` is the model, `weights` gives it
its parameters, `prefill` runs it.
"""

from .config import Config as Config
from .config import read_config as read_config
from .decoder import Decoder as Decoder
from .errors import InputError as InputError
from .prefill import prefill as prefill
from .sharding import make_mesh as make_mesh
from .weights import load as load
