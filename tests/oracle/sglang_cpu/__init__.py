"""SGLang 0.5.23's own forward of GLM-5.3-Flash on a CPU, under Triton's interpreter, as the oracle of our mathematics.

`forward.serving` is the entry point; `patches.TABLE` lists every change to SGLang and why it is needed. Importing this
package imports neither SGLang nor Triton: call `context.prepare_environment()` before anything that does.
"""
