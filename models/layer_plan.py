"""Layer plans: which layers compute a block selection and which inherit it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Refresh layers select blocks; a reuse layer inherits those of the nearest refresh layer before it.

    Args:
      refresh: for each layer, whether it selects.

    Raises:
      ValueError: no layers, or a first layer that would have nothing to inherit.
    """

    refresh: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.refresh:
            raise ValueError("layer plan: needs at least one layer")
        if not self.refresh[0]:
            raise ValueError("layer plan: layer 0 must be a refresh layer, it has nothing to inherit")

    @classmethod
    def every(cls, num_layers: int, interval: int = 1) -> LayerPlan:
        """Refresh at layers 0, interval, 2 * interval, ...; interval 1 refreshes everywhere."""
        if interval < 1:
            raise ValueError(f"layer plan: refresh-every must be >= 1, got {interval}")
        return cls(refresh=tuple(layer % interval == 0 for layer in range(num_layers)))

    @classmethod
    def at(cls, num_layers: int, layers: tuple[int, ...]) -> LayerPlan:
        """Refresh at the given layers.

        Raises:
          ValueError: a layer that the model does not have, or a plan without layer 0.
        """
        outside = [layer for layer in layers if not 0 <= layer < num_layers]
        if outside:
            raise ValueError(f"layer plan: no layer {outside[0]}, the model has layers 0 to {num_layers - 1}")
        return cls(refresh=tuple(layer in layers for layer in range(num_layers)))

    @property
    def all_refresh(self) -> bool:
        """Whether no layer inherits."""
        return all(self.refresh)
