"""The walk behind the tile widget is FlashAttention: its running values end in the softmax of the whole row."""

import pytest
import torch

from labkit import plots, widgets
from labkit.tilewalk import walk


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("block_m", "block_n"), [(4, 4), (2, 6), (12, 3)])
def test_the_last_visit_of_each_row_tile_holds_the_softmax_of_its_rows(causal, block_m, block_n):
    w = walk(12, block_m, block_n, causal)
    last = {v.row_tile: v for v in w.visits}
    m = torch.cat([v.m for v in last.values()])
    total = torch.cat([v.l for v in last.values()])
    assert torch.equal(m, w.scores.max(dim=1).values)
    assert torch.allclose(total, torch.exp(w.scores - m[:, None]).sum(dim=1))
    assert w.o.shape == (12, 2)


def test_a_causal_walk_never_visits_what_no_row_sees():
    assert walk(12, 4, 4, causal=True).visited == {(i, j) for i in range(3) for j in range(i + 1)}
    assert len(walk(12, 4, 4, causal=False).visited) == 9


def test_tiles_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="block_m 5 and block_n 4 must divide seq_len 12"):
        walk(12, 5, 4)


def test_the_widget_shows_another_picture_for_each_tile():
    controls, picture, text = widgets.tile_stepper(walk()).children
    first = bytes(picture.value)
    controls.children[1].value = 3
    assert picture.value != first
    assert "row tile <b>2</b>" in text.value


def test_the_static_picture_counts_the_tiles_that_are_never_loaded():
    figure = plots.tile_map(walk())
    assert figure.axes[0].get_title(loc="left") == "tile 6 of 6, 3 never loaded"
