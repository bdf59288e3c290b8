"""Collectives against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.cost_model.operators import (
    ALONE,
    Fabric,
    all_gather,
    all_reduce,
    all_to_all,
    make_group,
    point_to_point,
    reduce_scatter,
)

FABRIC = Fabric(8, 200e9, 100e9, link_latency_s=0.0, network_latency_s=0.0)
GB = 1e9


def test_groups_fill_nodes_by_their_stride() -> None:
    assert make_group(1, 1, FABRIC) == ALONE
    eight = make_group(8, 1, FABRIC)
    assert (eight.inside, eight.nodes, eight.rivals) == (8, 1, 1)
    replicas = make_group(4, 8, FABRIC)  # tensor parallel 8: one member in each node, eight groups side by side
    assert (replicas.inside, replicas.nodes, replicas.rivals) == (1, 4, 8)
    mixed = make_group(16, 4, FABRIC)
    assert (mixed.inside, mixed.nodes, mixed.rivals) == (2, 8, 4)


def test_inside_a_node() -> None:
    eight = make_group(8, 1, FABRIC)
    assert all_reduce(GB, eight, FABRIC) == pytest.approx(2 * 7 / 8 * GB / 200e9)
    assert all_gather(GB, eight, FABRIC) == reduce_scatter(GB, eight, FABRIC) == pytest.approx(7 / 8 * GB / 200e9)
    assert all_to_all(GB, eight, FABRIC) == pytest.approx(7 / 8 * GB / 200e9)
    assert point_to_point(GB, 4, FABRIC) == pytest.approx(GB / 200e9)
    for collective in (all_reduce, all_gather, all_to_all):
        assert collective(GB, ALONE, FABRIC) == 0


def test_between_nodes_the_adapters_are_shared() -> None:
    assert all_reduce(GB, make_group(16, 1, FABRIC), FABRIC) == pytest.approx(2 * 15 / 16 * GB / 100e9)
    # Eight groups of one GPU a node have an eighth of the adapters each.
    assert all_reduce(GB, make_group(4, 8, FABRIC), FABRIC) == pytest.approx(2 * 3 / 4 * GB / 12.5e9)
    assert all_gather(GB, make_group(4, 8, FABRIC), FABRIC) == pytest.approx(3 / 4 * GB / 12.5e9)
    assert point_to_point(GB, 8, FABRIC) == pytest.approx(GB / 12.5e9)
    # Half of what a process sends of 16 leaves its node.
    assert all_to_all(GB, make_group(16, 1, FABRIC), FABRIC) == pytest.approx(GB / 2 / 12.5e9)


def test_latency_of_small_messages_grows_with_depth_not_with_length() -> None:
    slow = Fabric(8, 200e9, 100e9, link_latency_s=1e-6, network_latency_s=1e-5)
    inside = all_reduce(8, make_group(8, 1, slow), slow)
    assert inside == pytest.approx(14e-6, rel=1e-3)  # a ring of eight: 2 x 7 hops
    # 1,024 GPUs: a ring would take 2 x 127 hops between nodes, a tree 2 x 7.
    assert all_reduce(8, make_group(1024, 1, slow), slow) == pytest.approx(2 * (7 * 1e-5 + 7e-6), rel=1e-3)


def test_a_network_without_bandwidth_is_refused() -> None:
    with pytest.raises(UserError, match="above zero"):
        Fabric(8, 200e9, 0)


@given(
    size=st.floats(1, 1e10), members=st.integers(2, 512), stride=st.sampled_from([1, 2, 4, 8]),
    link=st.floats(1e9, 1e12), network=st.floats(1e8, 1e12), more=st.floats(1, 10),
)  # fmt: skip
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(
    size: float, members: int, stride: int, link: float, network: float, more: float
) -> None:
    plain, wide = Fabric(8, link, network), Fabric(8, link * more, network * more)
    who = make_group(members, stride, plain)
    for collective in (all_reduce, all_gather, all_to_all):
        assert collective(size, who, wide) <= collective(size, who, plain) * (1 + 1e-9)
        assert collective(size * more, who, plain) >= collective(size, who, plain) * (1 - 1e-9)
