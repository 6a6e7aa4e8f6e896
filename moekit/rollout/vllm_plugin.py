"""Inside vLLM's processes: new weights from safetensors files below one folder, and nothing else.

vLLM finds `register` through the entry point `vllm.general_plugins` and loads it in each of its processes. Files are
named relative to the folder given at the start; a path that leaves it is refused, and nothing is unpickled. One host,
or a file system that trainer and engine share; no process group.

Names are those of a Hugging Face folder, with one tensor for each expert or with fused experts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

BACKEND = "moekit_files"
TORN = "an update of the weights was not finished"  # what `ask` is answered with

SPLITS = (
    "vLLM on a CPU ends when it splits the prompt of a request that has a seed, as all of ours: start the server with "
    "--no-enable-chunked-prefill, or make the LLM with enable_chunked_prefill=False"
)


def inside(root: str, file: str) -> str:
    """The real path of `file` below `root`.

    Raises ValueError: it leads out of `root`, through a link too.
    """
    base = os.path.realpath(root)
    path = os.path.realpath(os.path.join(base, file))
    if os.path.commonpath([base, path]) != base or path == base:
        raise ValueError(f"{file!r} is not a file below {base}; weights are read from that folder only")
    return path


def register() -> None:
    """Make the backend known to vLLM; called in each of its processes, more than once in some."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory as Factory,
    )

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, _backend())


def repack_experts(model) -> None:
    """On CPU vLLM 0.32 packs experts for its kernel at the first load only: a reload leaves them unpacked in the packed
    storage and every answer is wrong without an error. Pack what was reloaded, as the first load does."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _backend() -> type:
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Root(WeightTransferInitInfo):
        root: str = ""
        ask: bool = False  # whether the weights are whole; changes nothing

    @dataclass
    class File(WeightTransferUpdateInfo):
        file: str = ""
        bytes: int = 0  # of the file
        tensors: int = 0  # of the whole update
        abandon: bool = False  # end the session with an error: what was loaded is not all

    class FileTransfer(WeightTransferEngine):
        init_info_cls, update_info_cls = Root, File
        supports_draft_weight_update = False
        root, torn = "", False

        def init_transfer_engine(self, init_info: Root) -> None:
            if self.device.type == "cpu" and self.vllm_config.scheduler_config.enable_chunked_prefill:
                raise ValueError(SPLITS)
            if init_info.ask:
                if self.torn:
                    raise ValueError(TORN)
                return
            if not os.path.isabs(init_info.root) or not os.path.isdir(init_info.root):
                raise ValueError(f"root={init_info.root!r} is not an absolute path of a folder")
            self.root = init_info.root

        def start_weight_update(self) -> None:
            if not self.root:
                raise ValueError("init_weight_transfer_engine was not called: no folder to read weights from")
            self.wanted, self.names, self.torn = 0, set[str](), True
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: File) -> None:
            if update_info.abandon:
                raise ValueError("the sender gave up; every tensor has to be sent again")
            path = inside(self.root, update_info.file)
            if (size := os.path.getsize(path)) != update_info.bytes:
                raise ValueError(f"{path} has {size} bytes, not {update_info.bytes}")
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if twice := self.names.intersection(names):
                    raise ValueError(f"{min(twice)} was sent twice in one update")
                self.names.update(names)
                self.model.load_weights((name, file.get_tensor(name).to(self.device)) for name in names)
            self.wanted = update_info.tensors

        def finish_weight_update(self) -> None:
            if len(self.names) != self.wanted:
                raise ValueError(f"{len(self.names)} tensors were sent, {self.wanted} were announced")
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                repack_experts(self.model)
            self.torn = False

        def shutdown(self) -> None:
            self.root = ""

    return FileTransfer
