"""Growth in a training loop of your own: plain PyTorch, no trainer.

    python examples/grow_by_hand.py

The task: what was the input 16 steps before the end? The first modules cannot know; the fifth, which hears every 16th
step, can, and its memory and the readout come in closed form.
"""

import torch

import mslmn


def batches(n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input (T, B, I), target (B, I)) pairs."""
    x = 0.5 * torch.randn(n, 64, 50, 4, generator=torch.Generator().manual_seed(seed))
    return [(batch, batch[-17]) for batch in x]


def main() -> None:
    torch.manual_seed(0)
    train, test = batches(20, seed=1), batches(5, seed=2)
    objective = mslmn.objectives.NMSE()
    objective.prepare(train)
    model = mslmn.SequenceModel(mslmn.MSLMN(4, 4, 8, num_modules=1), 4)

    def error() -> float:
        with torch.no_grad():
            return sum(objective.loss(model(x), y).mean.item() for x, y in test) / len(test)

    for stage in range(5):
        if stage:
            report = mslmn.add_module(model, train, objective, horizon=2)
            print(report)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)  # a new one: there are new parameters
        for _ in range(3):
            for x, y in train:
                optimiser.zero_grad()
                objective.loss(model(x), y).mean.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
        print(f"{model.num_modules} modules, trained: NMSE {error():.3f} on new sequences")


if __name__ == "__main__":
    main()
