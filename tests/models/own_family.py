from jaxinfer.models import register
from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Family, llama_like_spec
from jaxinfer.models.spec import PlainMlpSpec


def spec_from_config(config, max_model_len):
    mlp = PlainMlpSpec(config["intermediate_size"], "relu2", bias=False)
    return llama_like_spec(config, max_model_len, mlp=mlp)


FAMILY = Family(
    architectures=("SquaredReluForCausalLM",),
    spec_from_config=spec_from_config,
    names=Names(up="mlp.rise", down="mlp.fall"),
)
register(FAMILY)
