from __future__ import annotations

import logging

import pytest
import torch

from ksana.errors import ModelLoadError
from ksana.models.loader import load_weights


class Receiver:
    """Takes the names it is made for."""

    def __init__(self, *names: str) -> None:
        self.missing = list(names)

    def load_weight(self, name: str, tensor: torch.Tensor) -> bool:
        if name not in self.missing:
            return False
        self.missing.remove(name)
        return True

    def num_weights(self) -> int:
        return len(self.missing)

    def finish_loading(self) -> list[str]:
        return self.missing


def load(receiver: Receiver, *names: str, dtype: torch.dtype = torch.float32) -> None:
    load_weights(receiver, ((name, torch.zeros(2, dtype=dtype)) for name in names), progress=False)  # type: ignore[arg-type]


def test_every_weight_finds_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(Receiver("a", "b"), "b", "a")
    assert [record.message.split(" of ")[0] for record in caplog.records] == ["loaded weights"]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_what_models_compute_themselves_is_passed_over(name: str) -> None:
    load(Receiver("a"), "a", name)


def test_progress_is_out_of_the_number_of_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to the library that draws
    load_weights(Receiver("a", "b"), ((name, torch.zeros(2)) for name in "ab"), progress=True)  # type: ignore[arg-type]
    assert "100%" in capsys.readouterr().err


def test_unexpected_names_are_listed() -> None:
    with pytest.raises(ModelLoadError, match="does not have: x0, x1, x2, x3, x4 and 2 more"):
        load(Receiver("a"), "a", *[f"x{i}" for i in range(7)])


def test_missing_names_are_listed() -> None:
    with pytest.raises(ModelLoadError, match=r"lack tensors that the model needs: b, lm_head\.weight"):
        load(Receiver("a", "b", "lm_head.weight"), "a")


def test_quantised_tensors_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"tensor a is of dtype torch\.int8"):
        load(Receiver("a"), "a", dtype=torch.int8)
