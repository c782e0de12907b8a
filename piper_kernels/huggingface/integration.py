"""The parts of transformers that we build on, or an error that says what to install.

The other files of this folder import transformers from here, so whichever loads first, a missing
or old transformers is met with the same words.
"""

import inspect

from piper_kernels.errors import instruction

_WHERE, _REMEDY = "piper_kernels.huggingface", "Run: pip install 'transformers>=5.17'"

try:
    import transformers
except ImportError as error:
    requirement = "be installed, version 5.17 or newer"
    raise ImportError(instruction(_WHERE, "transformers", requirement, "none", _REMEDY)) from error

try:
    from transformers import activations, integrations, modeling_utils
    from transformers.integrations import moe

    # the flag came with 5.17, with the others that we read
    _IS_NEW_ENOUGH = "has_gate" in inspect.signature(moe.use_experts_implementation).parameters
except (ImportError, AttributeError):
    _IS_NEW_ENOUGH = False

if not _IS_NEW_ENOUGH:
    version = getattr(transformers, "__version__", "unknown")
    raise ImportError(
        instruction(_WHERE, "transformers", "be version 5.17 or newer", version, _REMEDY)
    )

__all__ = ["activations", "integrations", "modeling_utils", "moe"]
