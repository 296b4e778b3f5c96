"""The one part of the package that touches SGLang.

| file | role |
|---|---|
| `reads/` | SGLANG_READS: every name we read, with its owner, kind, parameters and purpose |
| `contract.py`, `source.py` | the check of those reads against SGLang's source, without importing it |
| `monokernel.py` | SGLang's plugin contract, re-exported |
| `model.py`, `loaded.py` | weights of a loaded model, and whether it is SGLang's own |
| `step.py`, `pools.py` | inputs and caches of a step |
| `tensors.py` | the check of every tensor that enters |
| `hooks.py` | watching the steps of a runner |
| `running.py` | the server of this process |
| `server.py` | server arguments and environment variables |
| `launch.py` | a server as it would be launched, resolved by SGLang itself |
| `bench_runner.py` | a model runner without a server, for the benchmark |

Importing this package imports neither SGLang nor torch; `monokernel`, `model` and the functions of the readers do.
"""

from glm53_mono.upstream.reads import SGLANG_READS

__all__ = ["SGLANG_READS"]
