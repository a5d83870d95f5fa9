"""Seconds of operations against what can be told in the head."""

from dataclasses import replace

import pytest
from tests.unit.planner.made import DEVICE, block, flat, matmul

from shoal.hardware.values import Curve
from shoal.planner.predict.compute_time import Cost, DeviceModel, matmul_seconds
from shoal.planner.predict.workload import Share
from shoal.planner.profile.values import Amount, Body, Operation, OperationKind, Phase, TensorCut

TILED = replace(DEVICE, multiprocessors=10, tile=(128, 256))


def seconds(operation: Operation, share: Share, device=DEVICE) -> float:
    return DeviceModel(device).operation(operation, share).device


def test_a_matmul_takes_its_flops_over_the_peak():
    assert seconds(matmul("x", 1000, 1000, 1000), Share(1)) == pytest.approx(2e-3)
    assert seconds(matmul("x", 1000, 1000, 1000), Share(3)) == pytest.approx(6e-3)


def test_a_matmul_of_few_flops_takes_its_bytes_over_the_bandwidth():
    thin = matmul("x", 1, 1000, 1000)
    assert seconds(thin, Share(1)) == pytest.approx((1000 + 10**6 + 1000) * 4 / 1e12)


@pytest.mark.parametrize("cut", [TensorCut.M, TensorCut.N, TensorCut.K, TensorCut.BATCH, TensorCut.ALL])
def test_tensor_parallelism_divides_what_is_cut(cut):
    operation = matmul("x", 1000, 1000, 1000, cut=cut)
    assert seconds(operation, Share(1, tensor=4)) == pytest.approx(2e-3 / 4)


def test_what_lies_between_pairs_is_divided_under_sequence_parallelism_alone():
    norm = Operation("norm", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=Amount(0, 4e9), cut=TensorCut.SEQUENCE)
    assert seconds(norm, Share(1, tensor=4)) == pytest.approx(4e-3)
    assert seconds(norm, Share(1, tensor=4, sequence=True)) == pytest.approx(1e-3)


def test_a_context_axis_divides_each_sample():
    operation = matmul("x", 1000, 1000, 1000)
    assert seconds(operation, Share(2, context=2)) == pytest.approx(seconds(operation, Share(1)))


def test_a_last_wave_of_tiles_takes_as_long_as_a_full_one():
    full = matmul_seconds(TILED, (1280, 1280, 4096, 1), "float32", Curve())
    one_more_row = matmul_seconds(TILED, (1281, 1280, 4096, 1), "float32", Curve())
    assert one_more_row > 1.02 * full
    large = matmul_seconds(TILED, (16384, 16384, 4096, 1), "float32", Curve())
    assert large == pytest.approx(2 * 16384**2 * 4096 / 1e12, rel=0.05)


def test_a_long_sum_is_split_where_there_are_few_tiles():
    few = matmul_seconds(TILED, (128, 128, 65536, 1), "float32", Curve())
    assert few < 2.0 * 128 * 128 * 65536 / (1e12 / 10) * 0.5  # not one multiprocessor by itself


def test_a_gpu_reaches_the_top_of_its_curve_and_a_cpu_what_the_curve_says():
    curve = Curve(((1e6, 0.1), (1e12, 0.5)))
    size = (1000.0, 1000.0, 1000.0, 1.0)
    assert matmul_seconds(DEVICE, size, "float32", curve) == pytest.approx(2e9 / 1e12 / curve.at(2e9))
    assert matmul_seconds(TILED, (16384, 16384, 4096, 1), "float32", curve) == pytest.approx(
        2 * 16384**2 * 4096 / 0.5e12, rel=0.05
    )


def test_the_slower_of_host_and_device_passes():
    assert Cost(2.0, 1.0).seconds == 2.0
    assert Cost(1.0, 3.0).seconds == 3.0
    slow_host = replace(DEVICE, dispatch_seconds=1.0)
    assert DeviceModel(slow_host).operation(matmul("x", 10, 10, 10), Share(1)).seconds == 1.0


def test_float32_takes_the_tensor_cores_only_where_the_program_lets_it():
    device = replace(DEVICE, flops={"float32": 1e12, "tf32": 8e12})
    operation = matmul("x", 1000, 1000, 1000)
    assert DeviceModel(device, fast_float32=True).operation(operation, Share(1)).device == pytest.approx(2e-3 / 8)
    assert DeviceModel(device).operation(operation, Share(1)).device == pytest.approx(2e-3)


def test_float32_convolutions_take_the_tensor_cores_by_torchs_default_and_are_copied_to_their_format():
    device = replace(DEVICE, flops={"float32": 1e12, "tf32": 8e12}, memory_bytes_per_second=1e12)
    amounts = {"read_bytes": Amount(0, 3e8), "written_bytes": Amount(0, 1e8)}
    convolution = replace(matmul("x", 1000, 1000, 1000), kind=OperationKind.CONVOLUTION, **amounts)
    slow = replace(convolution, k=Amount(10000))

    def of(operation: Operation, **settings: bool) -> float:
        return DeviceModel(device, **settings).operation(operation, Share(1)).device

    assert of(slow, fast_convolutions=True) == pytest.approx(of(slow) / 8)
    copied = of(convolution, fast_convolutions=True, channels_first=True)
    assert copied == pytest.approx(of(convolution, fast_convolutions=True) + 2 * 4e8 / 1e12)
    assert of(convolution, channels_first=True) == of(convolution), "without tensor cores any format is multiplied"
    computer = DeviceModel(device, fast_convolutions=True)
    assert computer.dtype("float32", OperationKind.CONVOLUTION) == "tf32"
    assert computer.dtype("float32") == "float32"


def test_a_dtype_that_the_device_does_not_have_is_multiplied_in_float32():
    assert seconds(replace(matmul("x", 1000, 1000, 1000), dtype="bfloat16"), Share(1)) == pytest.approx(2e-3)


def test_fused_attention_counts_its_flops_at_its_own_rate():
    device = replace(DEVICE, attention={"flash2_forward": 0.5, "flash2_backward": 0.25})
    attention = Operation(
        "attention", "", OperationKind.ATTENTION, Phase.FORWARD, Amount(0, 1e12), n=Amount(512), k=Amount(64)
    )
    assert seconds(attention, Share(1), device) == pytest.approx(2.0)
    assert seconds(replace(attention, phase=Phase.BACKWARD_INPUT), Share(1), device) == pytest.approx(4.0)


def test_a_convolution_as_measured_follows_what_it_reuses():
    device = replace(DEVICE, convolution={"float32": Curve(((10.0, 0.1), (100.0, 0.8)))})
    convolution = replace(matmul("x", 10**6, 300, 300), kind=OperationKind.CONVOLUTION)
    assert seconds(convolution, Share(1), device) == pytest.approx(2 * 10**6 * 300 * 300 / 0.8e12)


def test_equal_operations_of_a_body_cost_the_same_and_others_their_own():
    """Names, modules and what is kept make no difference; sizes, cuts and dtypes do."""
    computer = DeviceModel(replace(DEVICE, matmul={"float32": flat(0.5)}))
    of_block = computer.each(block(), Share(1))
    assert sum(cost.device for cost in of_block) == pytest.approx(24e-3)
    first = matmul("a", 1000, 1000, 1000)
    moves = Operation("aten.a", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=Amount(0, 1e6))
    operations = (
        first,
        replace(first, name="b", module="b", saved_bytes=Amount(0, 8)),
        replace(first, n=Amount(500)),
        replace(first, cut=TensorCut.N),
        moves,
        replace(moves, phase=Phase.BACKWARD_INPUT, dtype="bfloat16"),
        replace(moves, launches=2),
    )
    share = Share(2, tensor=2)
    assert computer.each(Body(operations), share) == [computer.operation(o, share) for o in operations]
    core = DeviceModel(replace(DEVICE, kind="cpu", operators={"aten.a": 0.5}))
    named = (moves, replace(moves, name="aten.b"))
    assert core.each(Body(named), share) == [core.operation(o, share) for o in named]


def test_layers_of_blocks_are_cast_where_the_device_multiplies_fewer_bits():
    """Twice the rate for products of blocks with a weight, and 2 bytes at 1e12 a second for what is cast."""
    device = replace(DEVICE, flops={"bfloat16": 1e12, "float8": 2e12}, memory_bytes_per_second=1e12)
    layer = replace(matmul("x", 1000, 1000, 1000), dtype="bfloat16")
    scores = replace(layer, batch=Amount(0, 4))
    computer = DeviceModel(device, layers="float8")
    found = [cost.device for cost in computer.each(Body((layer, scores), repeated=True), Share(1))]
    assert found == pytest.approx([1e-3 + 2 * 1e6 / 1e12, 8e-3])
    (of_weight,) = computer.each(Body((replace(layer, phase=Phase.BACKWARD_WEIGHT),), repeated=True), Share(1))
    assert of_weight.device == pytest.approx(1e-3 + 2 * 2e6 / 1e12)
    (head,) = computer.each(Body((layer,)), Share(1))
    assert head.device == pytest.approx(2e-3)
    anew = DeviceModel(device, layers="float8", scales_anew=True)  # 5 bytes for an input, 3 for a gradient, at each use
    ways = [replace(layer, phase=phase) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)]
    found = [cost.device for cost in anew.each(Body(tuple(ways), repeated=True), Share(1))]
    assert found == pytest.approx([1e-3 + 5e6 / 1e12, 1e-3 + 3e6 / 1e12, 1e-3 + 8e6 / 1e12])
    partly = DeviceModel(device, layers="float8", scales_anew=True, wide_weights=True)  # the weight's gradient is not
    last = [cost.device for cost in partly.each(Body(tuple(ways), repeated=True), Share(1))]
    assert last == pytest.approx([*found[:2], 2e-3])
    older = DeviceModel(replace(device, flops={"bfloat16": 1e12}), layers="float8")
    (wide,) = older.each(Body((layer,), repeated=True), Share(1))
    assert wide.device == pytest.approx(2e-3)


def test_a_gpu_reads_again_what_its_blocks_cannot_keep():
    softmax = Operation("aten._softmax", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=Amount(1e6))
    again = replace(softmax, reread_bytes=Amount(2e6))
    assert seconds(again, Share(1)) == pytest.approx(3 * seconds(softmax, Share(1)))
    core = replace(DEVICE, kind="cpu")
    assert seconds(again, Share(1), core) == seconds(softmax, Share(1), core)


def test_a_core_reads_from_memory_what_its_caches_have_lost():
    """2 MB: 1e12 from the caches, 1e11 where a step goes through 100 MB before it comes back to them."""
    core = replace(DEVICE, kind="cpu", memory=Curve(((1e6, 10.0), (1e7, 1.0))), memory_bytes_per_second=1e11)
    relu = Operation("aten.relu", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=Amount(0, 0.5e6))
    relu = replace(relu, written_bytes=relu.read_bytes)
    assert DeviceModel(core).operation(relu, Share(1)).device == pytest.approx(1e-6)
    assert DeviceModel(core, touched=Amount(0, 1e8)).operation(relu, Share(1)).device == pytest.approx(1e-5)
    gpu = replace(core, kind="gpu")
    assert DeviceModel(gpu, touched=Amount(0, 1e8)).operation(relu, Share(1)).device == pytest.approx(1e-6)


def test_an_operator_that_computes_longer_than_it_moves():
    core = replace(DEVICE, kind="cpu", operators={"aten.gelu": 0.01})
    half = Amount(0, 0.5e9)
    gelu = Operation("aten.gelu", "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=half, written_bytes=half)
    assert DeviceModel(core).operation(gelu, Share(1)).device == pytest.approx(0.1)
    assert DeviceModel(core).operation(replace(gelu, name="aten.relu"), Share(1)).device == pytest.approx(1e-3)


def test_attention_by_its_length():
    core = replace(DEVICE, kind="cpu", attention_lengths={"flash2_forward": Curve(((64.0, 0.1), (512.0, 0.5)))})
    short = Operation("attention", "", OperationKind.ATTENTION, Phase.FORWARD, flops=Amount(0, 1e9), n=Amount(64))
    assert DeviceModel(core).operation(short, Share(1)).device == pytest.approx(1e-2)
    assert DeviceModel(core).operation(replace(short, n=Amount(512)), Share(1)).device == pytest.approx(2e-3)


def test_a_convolution_is_as_fast_as_the_nearest_that_was_measured():
    windows = {"64-64-3-28-1": 0.5, "64-64-3-28-2": 0.1, "512-512-3-4-1": 0.25}
    core = replace(DEVICE, kind="cpu", windows={"float32": windows})
    made = replace(matmul("x", 1000, 1000, 1000), kind=OperationKind.CONVOLUTION, window=(128, 128, 3, 14, 1, 1))
    assert seconds(made, Share(1), core) == pytest.approx(2e-3 / 0.5)
    assert seconds(replace(made, window=(256, 512, 3, 4, 1, 1)), Share(1), core) == pytest.approx(2e-3 / 0.25)
    assert seconds(replace(made, window=(512, 512, 3, 4, 2, 1)), Share(1), core) == pytest.approx(2e-3 / 0.1)
    # Twenty channels, in or out, leave twelve of 32 lanes empty.
    assert seconds(replace(made, window=(64, 20, 3, 28, 1, 1)), Share(1), core) == pytest.approx(2e-3 / 0.5 * 32 / 20)
    both = replace(made, window=(20, 20, 3, 28, 1, 1))
    assert seconds(both, Share(1), core) == pytest.approx(2e-3 / 0.5 * (32 / 20) ** 2)


def test_products_with_the_zeros_around_an_image_take_no_time():
    core = replace(DEVICE, kind="cpu", windows={"float32": {"64-64-3-4-1": 0.5, "64-64-3-8-2": 0.5}})
    made = replace(matmul("x", 1000, 1000, 1000), kind=OperationKind.CONVOLUTION, window=(64, 64, 3, 4, 1, 0))
    # Around four pixels a side, the first and the last place have two taps of three within: 10 of 12, either way.
    assert seconds(made, Share(1), core) == pytest.approx(2e-3 / 0.5 * (12 / 10) ** 2)
    # At stride 2 the image of 17 pixels less two has one tap without at either end.
    assert seconds(replace(made, window=(64, 64, 3, 8, 2, 0)), Share(1), core) == pytest.approx(
        2e-3 / 0.5 * (24 / 22) ** 2
    )
    # More zeros than that of the nearest: not faster than that.
    assert seconds(replace(made, window=(64, 64, 3, 4, 1, 2)), Share(1), core) == pytest.approx(2e-3 / 0.5)


# A stream runs at 1e12 bytes a second in the caches and at a tenth of that beyond them.
CORE = replace(DEVICE, kind="cpu", memory=Curve(((1e6, 1.0), (1e7, 0.1))), memory_bytes_per_second=1e12)
FAR = Amount(1e9)


def far(operation: Operation, device=CORE, touched: Amount = FAR) -> float:
    return DeviceModel(device, touched=touched).operation(operation, Share(1)).device


def moves(name: str, read: float, written: float) -> Operation:
    amounts = Amount(0, read), Amount(0, written)
    return Operation(name, "", OperationKind.MEMORY, Phase.FORWARD, read_bytes=amounts[0], written_bytes=amounts[1])


def test_a_core_computes_and_then_waits_for_what_its_caches_do_not_serve():
    """2e9 products at 1e12, and two reads and a write of 4e6 bytes: four lines for the three of a stream."""
    product = matmul("aten.mm", 1000, 1000, 1000)
    in_caches = replace(CORE, memory=Curve(((1e6, 1.0),)))
    assert far(product, in_caches) == pytest.approx(2e-3)
    assert far(product) == pytest.approx(2e-3 + 16e6 / 1.5 * (1e-11 - 1e-12))
    assert seconds(product, Share(1)) == pytest.approx(2e-3)  # a GPU does both at once


def test_a_layer_with_a_bias_on_a_core_writes_its_result_twice():
    layer, product = (matmul(name, 1000, 1000, 1000) for name in ("aten.addmm", "aten.mm"))
    assert far(layer) - far(product) == pytest.approx(3 * 4e6 / 1.5 * (1e-11 - 1e-12))
    assert seconds(layer, Share(1)) == seconds(product, Share(1))


def test_new_memory_is_read_before_it_is_written_and_what_was_read_is_not():
    assert far(moves("aten.relu", 1e6, 1e6)) == pytest.approx(2e6 / 1e11)
    assert far(moves("aten.add_", 2e6, 1e6)) == pytest.approx(2e6 / 1e11)
    assert far(moves("aten.add", 2e6, 1e6)) == pytest.approx(4e6 / 1.5 / 1e11)
    assert far(moves("aten.fill_", 0.0, 1e6)) == pytest.approx(2e6 / 1.5 / 1e11)
    device = replace(CORE, kind="gpu")
    assert far(moves("aten.add_", 2e6, 1e6), device) == far(moves("aten.add", 2e6, 1e6), device)


def test_an_activation_function_on_a_core_is_computed_and_moved():
    device = replace(CORE, operators={"aten.gelu": 0.5})
    assert far(moves("aten.gelu", 1e6, 1e6), device) == pytest.approx(2e6 / 5e11 + 2e6 * (1e-11 - 1e-12))


def test_an_update_writes_over_what_it_has_read():
    core, gpu = (DeviceModel(device) for device in (CORE, DEVICE))
    assert core.rewritten(3e6, 1e9, "update") == pytest.approx(2e6 / 1e11)
    assert gpu.rewritten(3e6, 1e9, "update") == pytest.approx(3e6 / 1e12)


def odd(n: float = 1001, dtype: str = "bfloat16") -> Operation:
    return replace(matmul("x", 1000, n, 1000), dtype=dtype, rows=("k", "n"))


def test_a_product_whose_rows_do_not_begin_at_16_bytes_runs_at_a_share_of_the_rate():
    device = replace(DEVICE, flops={"float32": 1e12, "bfloat16": 1e12}, unaligned=0.25)
    assert seconds(odd(), Share(1), device) == pytest.approx(2.002e-3 / 0.25)
    assert seconds(odd(1004), Share(1), device) == pytest.approx(2.008e-3 / 0.25)  # 8 bytes are not enough
    assert seconds(odd(1000), Share(1), device) == pytest.approx(2e-3)
    assert seconds(replace(odd(), rows=("k",)), Share(1), device) == pytest.approx(2.002e-3)  # no row runs along n
    assert seconds(odd(), Share(1), replace(device, unaligned=1.0)) == pytest.approx(2.002e-3)


def test_no_other_dtype_device_or_kind_is_slower_for_its_rows():
    device = replace(DEVICE, flops={"float32": 1e12, "bfloat16": 1e12, "float8": 1e12}, unaligned=0.25)
    assert seconds(odd(dtype="float32"), Share(1), device) == pytest.approx(2.002e-3)
    assert seconds(odd(dtype="float8"), Share(1), device) == pytest.approx(2.002e-3, rel=0.01)  # and its cast
    core = replace(device, kind="cpu")
    assert seconds(odd(), Share(1), core) == seconds(odd(), Share(1), replace(core, unaligned=1.0))
    wide = replace(device, flops={"float32": 1e12})  # it multiplies in float32
    assert seconds(odd(), Share(1), wide) == pytest.approx(2.002e-3)


def test_compiled_steps_pad_the_rows_of_their_products_themselves():
    device = replace(DEVICE, flops={"float32": 1e12, "bfloat16": 1e12}, unaligned=0.25)

    def taken(fuses: bool) -> float:
        (cost,) = DeviceModel(device, fuses=fuses).each(Body((odd(),)), Share(1))
        return cost.device

    assert taken(True) == pytest.approx(2.002e-3)
    assert taken(False) == pytest.approx(2.002e-3 / 0.25)
