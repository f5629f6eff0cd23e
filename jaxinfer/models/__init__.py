from jaxinfer.models.registry import register

__all__ = ["register"]
