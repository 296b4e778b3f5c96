"""SGLANG_AMD_MONO_CHECK: each routed step beside SGLang's own parts, on the device, eagerly and in captured graphs."""
