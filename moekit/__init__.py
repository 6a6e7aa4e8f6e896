"""moekit: post-training sparse mixture-of-experts language models, from a notebook.

The public names below load what they need when they are first used (PEP 562), so `import moekit` is quick, starts no
CUDA and pulls in neither plotly nor widgets. Everything else is imported from where it lives, as in
`from moekit.data.pack import build_rows`.

>>> import moekit
>>> "submit" in dir(moekit)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors, ops
    from .config import DataConfig, FilterConfig, LearnerConfig, ModelConfig, RouterLossConfig, SFTConfig
    from .data.batch import Batch
    from .launch.job import Job, attach
    from .launch.pool import workers
    from .launch.submit import submit
    from .launch.sweep import Sweep, attach_sweep, sweep
    from .launch.worker import here
    from .learner.learner import Learner
    from .learner.weights import export, load
    from .measure.headline import headline
    from .measure.record import open_run
    from .model.transformer import Transformer
    from .objectives.dpo import DPO
    from .objectives.grpo import GRPO
    from .objectives.ppo import PPO
    from .objectives.sft import SFT
    from .recipes.generate import generate
    from .recipes.layouts import check_layouts
    from .recipes.plan import plan
    from .rollout.embedded import EmbeddedEngine
    from .rollout.engine import Sampling
    from .viz.compare import compare
    from .viz.dashboard import dashboard
    from .viz.live import live
    from .viz.show import show
    from .workloads import DPOConfig, GRPOConfig, PPOConfig, RewardConfig

__version__ = "0.1.0"

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "Batch",
    "DPOConfig",
    "DataConfig",
    "EmbeddedEngine",
    "FilterConfig",
    "GRPOConfig",
    "Job",
    "Learner",
    "LearnerConfig",
    "ModelConfig",
    "PPOConfig",
    "RewardConfig",
    "RouterLossConfig",
    "SFTConfig",
    "Sampling",
    "Sweep",
    "Transformer",
    "__version__",
    "attach",
    "attach_sweep",
    "check_layouts",
    "compare",
    "dashboard",
    "errors",
    "export",
    "generate",
    "headline",
    "here",
    "live",
    "load",
    "open_run",
    "ops",
    "plan",
    "show",
    "submit",
    "sweep",
    "workers",
]

# the module that holds them -> public names; an empty string: the names are themselves modules
_MODULES = {
    "": "errors ops",
    "config": "DataConfig FilterConfig LearnerConfig ModelConfig RouterLossConfig SFTConfig",
    "data.batch": "Batch",
    "launch.job": "Job attach",
    "launch.pool": "workers",
    "launch.submit": "submit",
    "launch.sweep": "Sweep attach_sweep sweep",
    "launch.worker": "here",
    "learner.learner": "Learner",
    "learner.weights": "export load",
    "measure.record": "open_run",
    "model.transformer": "Transformer",
    "objectives.dpo": "DPO",
    "objectives.grpo": "GRPO",
    "objectives.ppo": "PPO",
    "objectives.sft": "SFT",
    "recipes.generate": "generate",
    "recipes.layouts": "check_layouts",
    "recipes.plan": "plan",
    "measure.headline": "headline",
    "viz.compare": "compare",
    "rollout.embedded": "EmbeddedEngine",
    "rollout.engine": "Sampling",
    "viz.dashboard": "dashboard",
    "viz.live": "live",
    "workloads": "DPOConfig GRPOConfig PPOConfig RewardConfig",
    "viz.show": "show",
}
_HOMES = {name: home for home, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:  # which lets type checkers report a name that does not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'moekit' has no attribute {name!r}; public names: {', '.join(__all__)}")
        home = _HOMES[name]
        module = importlib.import_module(f"{__name__}.{home or name}")
        value = getattr(module, name) if home else module
        globals()[name] = value  # found without a detour from now on
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
