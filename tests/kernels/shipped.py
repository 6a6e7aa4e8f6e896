"""What the library launches of Triton kernels, as `aot.py` compiles it: one function for each kernel file.

Each gives `list[tuple[name, jit function, signature, constexprs, num_warps, num_stages]]`. A signature names every
argument that is no constexpr; `:16` after a type says that its value is a multiple of 16 ("*bf16:16", "i32:16"), as the
launcher finds out by itself at run time; a constexpr value may be None for a pointer that is absent. A name that ends
in "*" says that the kernel multiplies matrices, so the unit for that must be used.
"""

from moekit.kernels import grouped_gemm as gemm
from moekit.kernels import mxfp8_triton as mx
from moekit.kernels import permute_triton as permute
from moekit.kernels import router_topk as router
from moekit.kernels import rowwise as rw
from moekit.kernels import swiglu as glu
from moekit.kernels import token_logprobs_triton as lp
from moekit.kernels.tuning import EXACT, NARROW, WEIGHTS


def grouped_gemm() -> list[tuple]:
    """All that one feed-forward launches, with contiguous operands and 64 experts."""
    found: list[tuple] = []
    types = dict.fromkeys(("offset_ptr", "row_ptr", "place_ptr", "dy_row_ptr", "x_row_ptr"), "*i64:16")
    types |= dict.fromkeys(("M", "K", "x_row", "y_row", "dy_row", "w_expert", "w_in", "w_out"), "i32:16")
    types |= {"R": "i32", "E": "i32", "dw_ptr": "*fp32:16"}
    forward, transposed, one = {"w_in": 1}, {"w_out": 1}, {"x_col": 1, "y_col": 1, "dy_col": 1}
    gather = {"GATHER": True, "SCATTER": False, "CLEAR": False, "place_ptr": None}
    scatter = {"GATHER": False, "SCATTER": True, "CLEAR": True, "row_ptr": None}
    uses = {"up": gather | forward, "down": scatter | forward, "dh": gather | transposed, "dx": scatter | transposed}
    d_up, d_down = {"GATHER_DY": False, "dy_row_ptr": None}, {"GATHER_X": False, "x_row_ptr": None}
    weights = {"d_up": d_up | {"GATHER_X": True}, "d_down": d_down | {"GATHER_DY": True}}
    for kind, precision, tiles in (("bf16", "ieee", NARROW), ("fp32", "ieee", EXACT), ("fp32", "tf32", EXACT)):
        name, star = (precision if precision == "tf32" else kind), "" if (kind, precision) == ("fp32", "ieee") else "*"
        operands = types | dict.fromkeys(("x_ptr", "w_ptr", "y_ptr", "dy_ptr"), f"*{kind}:16")
        jobs = [(f"grouped_gemm {name} {t.rows} {use}{star}", gemm._rows_kernel, t, ("BLOCK_R", "BLOCK_M", "BLOCK_K"),
                 flags | {"EXPERTS": 128}) for t in tiles.values() for use, flags in uses.items()]  # fmt: skip
        t = WEIGHTS[2 if kind == "bf16" else 4]
        jobs += [(f"grouped_wgrad {name} {use}{star}", gemm._weight_kernel, t, ("BLOCK_M", "BLOCK_K", "BLOCK_R"),
                  flags | {"ADD": True, "w_in": 1}) for use, flags in weights.items()]  # fmt: skip
        for name, kernel, t, blocks, flags in jobs:
            constants = dict(zip(blocks, (t.rows, t.cols, t.depth))) | flags | {"PRECISION": precision}
            constants |= {a: 1 for a in one if a in kernel.arg_names}
            found.append((name, kernel, {a: kind for a, kind in operands.items() if a in kernel.arg_names},
                          constants, t.warps, t.stages))  # fmt: skip
    return found


def mxfp8() -> list[tuple]:
    """Quantise along rows, columns and both, and multiply."""
    bytes_ = dict.fromkeys(("code_ptr", "scale_ptr", "turned_ptr", "turned_scale_ptr"), "*u8:16")
    sizes = {"x_ptr": "*bf16:16"} | dict.fromkeys(("R", "K", "x_batch", "x_row"), "i32:16")
    tiles = {"rows": (True, False, 16, 256), "columns": (False, True, 64, 64), "both": (True, True, 64, 64)}
    flags = ("ROWS", "COLUMNS", "BLOCK_R", "BLOCK_K")
    scaled = dict.fromkeys(("x_ptr", "x_scale_ptr", "w_ptr", "w_scale_ptr"), "*u8:16") | {"y_ptr": "*bf16:16"}
    scaled |= {"offset_ptr": "*i64:16", "R": "i32", "M": "i32:16", "K": "i32:16", "E": "i32"}
    found = [("mxfp8 grouped_mm*", mx._scaled_kernel, scaled, {"EXPERTS": 128, **mx.TILE}, 8, 3)]
    for name, tile in tiles.items():
        constants = dict(zip(flags, tile)) | {"FLOOR": False, "x_col": 1}
        found.append((f"mxfp8 quantise {name}", mx._quantise_kernel, bytes_ | sizes, constants, 4, 3))
    return found


def permute_rows() -> list[tuple]:
    """The plan, and the sums there and back."""
    types = dict.fromkeys(("x", "rows", "dy", "out"), "*bf16:16") | dict.fromkeys(("gate", "dgate"), "*fp32:16")
    types |= (
        dict.fromkeys(("expert", "rank", "count", "place"), "*i64:16") | dict.fromkeys("NRE", "i32") | {"D": "i32:16"}
    )
    found = [("plan rank", permute._rank_kernel, types, {"BLOCK": permute.BLOCK, "PART": 8}, 4, 3)]
    for name, fn, K in (
        ("permute", permute._sum_kernel, 1),
        ("combine", permute._sum_kernel, 8),
        ("combine dgate", permute._dgate_kernel, 8),
    ):
        found.append((name, fn, types, {"K": K, "BLOCK_N": permute.TILE[0], "BLOCK_D": permute.TILE[1]}, 4, 3))
    return found


def router_topk() -> list[tuple]:
    """Of 64 and of 1024 experts."""
    types = dict.fromkeys(("logits", "bias"), "*fp32:16") | dict.fromkeys(("expert", "count"), "*i64:16")
    types |= {"counted": "*i1:16", "N": "i32"}
    sizes = [{"E": E, "K": 16, "SCORE": 1, "BLOCK_N": router.TILE // E, "BLOCK_E": E} for E in (64, 1024)]
    return [(f"router_topk {s['E']} experts", router._choose, types, s, 4, 3) for s in sizes]


def rowwise() -> list[tuple]:
    """put and get."""
    types = {"near": "*bf16:16", "peer": "*i64:16", "rank": "*i64:16", "row": "*i64:16", "R": "i32", "D": "i32:16"}
    sizes = {"WIDE": True, "BLOCK_R": rw.TILE[0], "BLOCK_D": rw.TILE[1]}
    return [(f"rowwise {n}", rw._move, types, sizes | {"COPIES": 1, "FETCH": n == "get"}, 4, 3) for n in ("put", "get")]


def swiglu() -> list[tuple]:
    """Forward and backward."""
    types = dict.fromkeys(("dh_ptr", "pre_ptr", "h_ptr", "dpre_ptr"), "*bf16:16") | {"E": "i32"}
    types |= dict.fromkeys(("gate_ptr", "dgate_ptr"), "*fp32:16") | dict.fromkeys(("slot_ptr", "offset_ptr"), "*i64:16")
    types |= dict.fromkeys(("F", "dh_row", "pre_row", "dpre_row", "h_row"), "i32:16")
    blocks = {"GATED": True, "BLOCK_R": glu.TILE.rows, "BLOCK_F": glu.TILE.cols}
    both = (("swiglu forward", glu._forward_kernel), ("swiglu backward", glu._backward_kernel))
    return [(name, kernel, types, blocks, glu.TILE.warps, glu.TILE.stages) for name, kernel in both]


def token_logprobs() -> list[tuple]:
    """Forward and backward, in bfloat16 and in float32."""
    types = dict.fromkeys(("lse", "entropy", "parts"), "*fp32:16") | dict.fromkeys(("grad", "grad_entropy"), "*fp32")
    types |= dict.fromkeys(("D", "span", "start", "row"), "i32:16")
    types |= {"label": "*i64", "M": "i32", "V": "i32", "scale": "fp32"}
    found = []
    for kind, m, v, d, *options in lp.TILES.values():
        kinds = types | dict.fromkeys(("hidden", "head", "dz"), f"*{kind[:4]}:16")
        for name, fn in (("forward", lp._forward), ("backward", lp._backward)):
            found.append((f"logprobs {name} {kind}", fn, kinds, {"BM": m, "BV": v, "BD": d}, *options))
    return found


ALL = (grouped_gemm, mxfp8, permute_rows, router_topk, rowwise, swiglu, token_logprobs)
