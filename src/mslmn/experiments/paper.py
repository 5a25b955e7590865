"""The numbers of the paper (Carta, Sperduti and Bacciu, 2020)."""

from typing import NamedTuple


class Generation(NamedTuple):
    """A column of Tables 1 and 2. Units in the order of `BUDGETS`."""

    hidden: tuple[int, ...]  # CW-RNN: per module
    memory: tuple[int, ...] | None  # per module
    learning_rate: float
    epochs: int
    nmse: float  # with 1,000 parameters


class Words(NamedTuple):
    """A line of Table 3."""

    hidden: int  # CW-RNN: per module
    memory: int | None  # per module
    accuracy: float
    deviation: float


class Handwriting(NamedTuple):
    """A line of Table 4: one of the two directions."""

    hidden: int  # CW-RNN: per module
    memory: int | None  # per module
    accuracy: float  # of the best path


BUDGETS = (100, 250, 500, 1000)
GENERATION_MODULES, WORD_MODULES, HANDWRITING_MODULES = 9, 7, 9
FORGET_GATE = 5.0  # bias of the LSTM's
NOISE = 0.6  # on the words

GENERATION = {
    "RNN": Generation((9, 15, 22, 31), None, 1e-3, 6000, 79.5e-3),
    "LSTM": Generation((4, 7, 10, 15), None, 1e-2, 12000, 20.7e-3),
    "CW-RNN": Generation((1, 2, 3, 4), None, 5e-5, 2000, 12.5e-3),
    "LMN": Generation((4, 7, 11, 2), (6, 10, 13, 29), 5e-4, 5000, 38.4e-3),
    "MS-LMN": Generation((1, 1, 1, 1), (1, 2, 3, 4), 5e-3, 8000, 0.116e-3),
}

WORDS = {
    "LSTM": Words(41, None, 0.559, 0.053),
    "LMN": Words(52, None, 0.550, 0.010),  # its memory size is not given
    "CW-RNN": Words(13, None, 0.744, 0.029),
    "MS-LMN": Words(25, 25, 0.780, 0.034),
    "incremental MS-LMN": Words(25, 25, 0.796, 0.038),
}

HANDWRITING = {  # the LMN is not in it
    "LSTM": Handwriting(110, None, 0.773),
    "CW-RNN": Handwriting(33, None, 0.329),
    "MS-LMN": Handwriting(144, 16, 0.265),
    "incremental MS-LMN": Handwriting(144, 16, 0.668),
}
