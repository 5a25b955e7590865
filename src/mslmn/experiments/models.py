"""The models of the paper, by name, and what is chosen for each."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .. import checks
from ..baselines import set_forget_gate_bias
from ..layers import LMN, MSLMN, ClockworkRNN
from ..model import SequenceModel
from ..training import Plan
from .paper import FORGET_GATE

INCREMENTAL = "incremental MS-LMN"
NAMES = ("RNN", "LSTM", "CW-RNN", "LMN", "MS-LMN", INCREMENTAL)
CLOCKED = ("CW-RNN", "MS-LMN", INCREMENTAL)


@dataclass(frozen=True)
class Settings:
    """What is chosen for one model: sizes, initial values, training."""

    hidden: int  # CW-RNN: per module
    memory: int | None = None  # per module, of LMN and MS-LMN
    modules: int = 1  # of CW-RNN and MS-LMN; the most that incremental training adds
    layers: int = 1  # on top of each other, each of these sizes
    layer_norm: bool = False  # between them; of ours, as the next one
    pool: int = 1  # steps of which a layer hands on the mean
    init: str = "xavier"
    standardise: float = 0.0  # gain of standardised inputs for first weights, see `standardise`; 0: as they are
    silent: bool = False  # only the fastest module is heard at first, see `SequenceModel.silence`; of MS-LMN
    learn_initial_state: bool = False
    forget_gate: float = FORGET_GATE  # bias of the LSTM's
    norm: str | None = None
    dropout: float = 0.0
    noise: float = 0.0  # see Plan, as the next one
    distort: float = 0.0
    first_module: str = "autoencoder"  # of incremental training, as the next two: see Plan
    readout: str = "auto"
    horizon: int | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    flat_start: int = 0
    clip: float = 1.0
    select: str = "loss"  # see Plan
    average: float = 0.0  # see Plan
    contract: bool = False
    batch_size: int = 1
    epochs: int = 1000  # passes over the training data; of each stage, where the model grows
    patience: int | None = None  # None: the number of epochs is chosen beforehand

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sizes(self, model: str) -> dict[str, int]:
        """Those that the model has."""
        found = {"hidden": self.hidden}
        if model in ("LMN", "MS-LMN", INCREMENTAL):
            found["memory"] = self.memory_size
        if model in CLOCKED:
            found["modules"] = self.modules
        if self.layers > 1:
            found["layers"] = self.layers
        return found

    @property
    def memory_size(self) -> int:
        return self.hidden if self.memory is None else self.memory

    def passes(self, most: int) -> int:
        """Over the data between two checkpoints: ``most``, or all there are."""
        return min(most, self.epochs)

    def checkpoints(self, passes: int) -> int:
        """Of a stage."""
        return self.epochs // self.passes(passes)

    def plan(self, model: str, seed: int, passes: int, **others: Any) -> Plan:
        """With at most ``passes`` over the data between two checkpoints."""
        return Plan(
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            warmup=self.warmup,
            flat_start=min(self.flat_start, self.checkpoints(passes) - 1),
            clip=self.clip,
            select=self.select,
            average=self.average,
            contract=self.contract,
            batch_size=self.batch_size,
            passes=self.passes(passes),
            epochs=self.checkpoints(passes),
            patience=self.patience or 10**6,
            grow="epochs" if model == INCREMENTAL else "never",
            first_module=self.first_module,
            readout=self.readout,
            horizon=self.horizon,
            growth_patience=self.modules,  # no module is the last because it did not help at once
            max_modules=self.modules,
            divergence="stop",
            seed=seed,
            **{"noise": self.noise, "distort": self.distort} | others,
        )


def build(
    model: str,
    settings: Settings,
    input_size: int,
    output_size: int,
    bidirectional: bool = False,
    **options: Any,
) -> SequenceModel:
    """An untrained model; initial values come from torch's random numbers."""
    checks.choice("model", model, NAMES)
    chosen: dict[str, Any] = {
        "init": settings.init,
        "learn_initial_state": settings.learn_initial_state,
        "bidirectional": bidirectional,
        "num_layers": settings.layers,
        "layer_norm": settings.layer_norm and settings.layers > 1,
        "pool": settings.pool,
    }
    hidden, memory = settings.hidden, settings.memory_size
    encoder: nn.Module
    if model == "LSTM":  # torch's, which cannot do without input
        if settings.pool > 1 or chosen["layer_norm"]:
            raise ValueError(
                "an LSTM has no pool and no layer_norm, which are of our layers, "
                f"got pool={settings.pool}, layer_norm={settings.layer_norm}; leave them out"
            )
        lstm = nn.LSTM(max(1, input_size), hidden, settings.layers, bidirectional=bidirectional)
        encoder = set_forget_gate_bias(lstm, settings.forget_gate)
    elif model in ("RNN", "CW-RNN"):  # with one module the Clockwork RNN is the simple RNN
        encoder = ClockworkRNN(input_size, hidden, settings.modules if model == "CW-RNN" else 1, **chosen)
    elif model == "LMN":
        encoder = LMN(input_size, hidden, memory, **chosen)
    else:
        encoder = MSLMN(input_size, hidden, memory, 1 if model == INCREMENTAL else settings.modules, **chosen)
    built = SequenceModel(encoder, output_size, norm=settings.norm, dropout=settings.dropout, **options)
    if settings.silent and model == "MS-LMN":
        built.silence()
    return built
