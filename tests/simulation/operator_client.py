"""A simulated person at a command line: `slimebus set`, once, then gone."""

from typing import TYPE_CHECKING

from simulation.actor import Actor, Request

from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World


class Operator(Actor):
    """Changes settings of the run while it goes on."""

    role = "client"

    def __init__(self, world: "World", name: str, settings: dict[str, m.Scalar]) -> None:
        self.settings = settings
        super().__init__(world, name)

    def begin(self, welcome: m.Welcome) -> None:
        self.ask(m.Set(key=self.instance, settings=self.settings), lambda *_: self.leave())

    def refused(self, error: m.Error, request: Request) -> None:
        self.die()
