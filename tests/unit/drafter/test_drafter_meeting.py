"""What a lost member raises is a broken group; what a GPU raises is its own process's end."""

import pytest
import torch

from protocol.errors import ConfigError, GroupBroken
from services.device import use_device
from services.drafter.meeting import broken


def test_errors_of_the_group_are_told_apart_from_those_of_the_gpu():
    with pytest.raises(GroupBroken, match="a sum: Connection closed by peer"), broken("a sum"):
        raise RuntimeError("Connection closed by peer\nand a long trace")
    for error in (torch.AcceleratorError, torch.OutOfMemoryError):
        with pytest.raises(error), broken("a sum"):
            raise error("an illegal memory access was encountered")


def test_a_gpu_that_is_not_there_is_a_wrong_option():
    use_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="cuda:99: there is no such GPU here"):
        use_device(torch.device("cuda", 99))
