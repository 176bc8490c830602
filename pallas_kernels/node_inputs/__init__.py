"""What an attention layer reads of its own nodes, from their projections."""

from .api import node_inputs
from .layout import EntryRows, HeadShape, NodeInputs
from .xla import gather_rows, rotate

__all__ = ["EntryRows", "HeadShape", "NodeInputs", "gather_rows", "node_inputs", "rotate"]
