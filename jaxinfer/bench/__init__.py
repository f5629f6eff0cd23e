"""`jaxinfer bench`: measures an engine in this process, or a server over HTTP. Flags and figures have vLLM's names."""
