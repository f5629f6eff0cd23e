"""What clients send, as pydantic models with the names of the OpenAI API and of vLLM's additions to it."""
