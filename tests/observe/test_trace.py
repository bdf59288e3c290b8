"""Where the time of profiled steps went: kernels by their real names, and moments that are each counted once."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.observe.profile import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    DATA,
    GUARD,
    HEAD,
    IDLE,
    KERNELS,
    MATMUL,
    MEMORY,
    OPERATIONS,
    OPTIMIZER,
    OTHER,
    PARTS,
    TraceEvent,
    TraceSlice,
    part_of,
    read_trace,
    split,
    step_time,
)

MULTI = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
NAMES = [
    (MATMUL, "nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT"),
    (MATMUL, "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NTN"),
    (MATMUL, "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)"),
    (MATMUL, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas"),
    (MATMUL, "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::Gem>>"),
    (MATMUL, "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>(...)"),
    (MATMUL, "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>(...)"),
    (MATMUL, "triton_tem_fused_mm_4"),
    (MATMUL, "ampere_sgemm_128x64_tn"),
    (ATTENTION, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0"),
    (ATTENTION, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0"),
    (ATTENTION, "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, int>(...)"),
    (ATTENTION, "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>"),
    (ATTENTION, "flash_fwd_kernel"),
    (ATTENTION, "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)"),
    (ATTENTION, "triton_tem_fused_flex_attention_0"),
    (HEAD, "_cross_entropy_rows"),
    (HEAD, "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>"),
    (OPTIMIZER, MULTI + "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>"),
    (GUARD, MULTI + "TensorListMetadata<1>, at::native::LpNormFunctor<float, 1, float, 1, 1, 0>"),
    (MEMORY, "triton_poi_fused_mul_silu_0"),
    (MEMORY, "triton_red_fused__to_copy_rms_norm_3"),
    (MEMORY, "triton_per_fused_native_layer_norm_backward_2"),
    (MEMORY, "triton_poi_fused__scaled_dot_product_flash_attention_1"),  # what inductor fused next to it
    (MEMORY, "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char*>"),
    (MEMORY, "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::BFloat16>(long, float)"),
    (MEMORY, "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>"),
    (MEMORY, "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<2>, 2, 128>"),
    (MEMORY, "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, true, false>"),
    (COMMUNICATION, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    (COPIES, "Memcpy HtoD (Pinned -> Device)"),
    (COPIES, "Memset (Device)"),
    (None, "somebody_elses_kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "name"), NAMES, ids=[name[:48] for _, name in NAMES])
def test_kernels_are_known_by_name(part: str | None, name: str) -> None:
    assert part_of(name, KERNELS) == part


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (MATMUL, "aten::addmm"), (MATMUL, "aten::mm"), (MATMUL, "aten::bmm"), (MATMUL, "aten::_scaled_mm"),
        (MATMUL, "mkldnn::_linear_pointwise"), (MEMORY, "aten::linear"), (MEMORY, "aten::mul"),
        (ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
        (ATTENTION, "aten::_scaled_dot_product_cudnn_attention"), (ATTENTION, "aten::_flash_attention_forward"),
        (HEAD, "_LinearCrossEntropy"), (HEAD, "_LinearCrossEntropyBackward"), (OPTIMIZER, "Optimizer.step#AdamW.step"),
        (MEMORY, "Torch-Compiled Region: 0/0"), (MEMORY, "CompiledFunctionBackward"),
        (None, "autograd::engine::evaluate_function: MmBackward0"), (None, "cudaLaunchKernel"),
    ],
)  # fmt: skip
def test_operations_are_known_by_name(part: str | None, name: str) -> None:
    assert part_of(name, OPERATIONS) == part


def host(name: str, start: float, end: float, thread: str = "main") -> TraceEvent:
    return TraceEvent("host", name, start, end, thread)


def launch(at: float, correlation: int, thread: str = "main") -> TraceEvent:
    return TraceEvent("launch", "cudaLaunchKernel", at, at + 1, thread, correlation)


def kernel(name: str, start: float, end: float, correlation: int = -1, stream: str = "7") -> TraceEvent:
    return TraceEvent("device", name, start, end, stream, correlation)


def test_on_a_gpu_every_moment_counts_once() -> None:
    events = [
        host("bessemer.steps", 100, 1100),
        kernel("nvjet_a", 90, 200),  # of the step before: 100 inside
        kernel("ncclDevKernel_AllGather", 150, 260, stream="20"),  # 60 of it beside nothing
        kernel("Memcpy DtoH", 250, 280, stream="21"),  # 20 alone
        host("bessemer.data", 300, 400),  # nothing runs: the GPU waits for data
        kernel("triton_poi_fused_add_0", 400, 500),
        host("bessemer.backward", 500, 560),
        host("_LinearCrossEntropyBackward", 510, 550, "autograd"),
        launch(520, 1, "autograd"),
        kernel("nvjet_b", 560, 660, 1),  # a product, but the loss head's
        host("bessemer.judge", 650, 900),
        launch(660, 2),
        kernel("void at::native::reduce_kernel<512>", 700, 720, 2),
        host("bessemer.optimizer", 800, 890),
        launch(810, 3),
        kernel("nvjet_newton_schulz", 850, 950, 3),
        kernel("somebody_elses_kernel", 1000, 1050),
        kernel("nvjet_c", 1090, 1300),  # ends after the window
    ]
    time = step_time(events)
    assert time.wall == 1000
    assert time.parts == {
        MATMUL: 110, ATTENTION: 0, HEAD: 100, MEMORY: 100, OPTIMIZER: 100, GUARD: 20 + 40 + 80, COPIES: 20,
        COMMUNICATION: 60, OTHER: 50, DATA: 100, IDLE: 1000 - 780,
    }  # fmt: skip
    assert time.idle_in == {"backward": 60, "optimizer": 50, "steps": 110}
    assert sum(time.parts.values()) == time.wall and time.on_device and time.compiled
    assert [(found.name, found.part, found.calls) for found in time.kernels if found.name == "nvjet_b"] == [
        ("nvjet_b", HEAD, 1)
    ]


def test_on_a_cpu_the_innermost_operation_counts() -> None:
    events = [
        host("bessemer.steps", 0, 100),
        host("bessemer.data", 0, 10),
        host("bessemer.forward", 10, 60),
        host("aten::linear", 12, 30),
        host("aten::addmm", 15, 25),
        host("aten::copy_", 16, 18),  # inside a product it is part of it
        host("_LinearCrossEntropy", 40, 60),
        host("aten::mm", 45, 50),
        host("bessemer.judge", 60, 95),
        host("bessemer.optimizer", 70, 90),
        host("aten::mul", 75, 80),
        host("aten::mul", 20, 80, "another thread"),
    ]
    time = step_time(events)
    assert {part: us for part, us in time.parts.items() if us} == {
        DATA: 10, MATMUL: 10, MEMORY: 8, HEAD: 20, GUARD: 15, OPTIMIZER: 20, IDLE: 17,
    }  # fmt: skip
    assert time.idle_in == {"forward": 12, "steps": 5} and not time.on_device and not time.compiled
    calls = {(found.name, found.part): found.calls for found in time.kernels}
    assert calls["aten::addmm", MATMUL] == 1 and calls["aten::mm", HEAD] == 1 and calls["aten::mul", OPTIMIZER] == 1


@given(
    st.lists(
        st.tuples(st.floats(-10, 110), st.floats(0, 60), st.integers(0, 3), st.sampled_from(PARTS)).map(
            lambda drawn: TraceSlice(drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])
        )
    )
)
def test_parts_always_add_up_to_the_wall_time(slices: list[TraceSlice]) -> None:
    spent = split(slices, 0.0, 100.0)
    assert sum(spent.values()) == pytest.approx(100.0)
    for piece in slices:
        if piece.rank == 0 and all(other.rank for other in slices if other.part != piece.part):
            assert spent[piece.part] >= min(piece.end, 100.0) - max(piece.start, 0.0) - 1e-9


def test_a_trace_is_read_without_what_repeats_it(tmp_path: Path) -> None:
    def event(cat: str, name: str, **more: object) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": 5.0, "dur": 2.5, "args": {}, **more}

    path = tmp_path / "trace.json.gz"
    events = [
        event("kernel", "k", args={"correlation": 4}), event("gpu_user_annotation", "bessemer.forward"),
        event("overhead", "Activity Buffer Request"), event("cuda_driver", "cuLaunchKernelEx", args={"correlation": 4}),
        {"ph": "s", "cat": "ac2g", "name": "flow", "id": 4}, {"ph": "M", "name": "process_name"},
        event("gpu_memcpy", "Memcpy HtoD"), event("user_annotation", "bessemer.forward"),
    ]  # fmt: skip
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert read_trace(path) == [
        TraceEvent("device", "k", 5.0, 7.5, "0/7", 4), TraceEvent("launch", "cuLaunchKernelEx", 5.0, 7.5, "0/7", 4),
        TraceEvent("device", "Memcpy HtoD", 5.0, 7.5, "0/7"), TraceEvent("host", "bessemer.forward", 5.0, 7.5, "0/7"),
    ]  # fmt: skip
