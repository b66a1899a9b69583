"""The deployments that are compared: replicas, and splits into prefill and decode."""

from dataclasses import dataclass

from proxy.placement.load_tracker import Disaggregate, Routing


@dataclass(frozen=True)
class Deployment:
    """The numbers of servers of each kind, and the options of the proxy.

    Attributes:
        prefills: number of prefill servers; 0: all servers are complete servers
            (replicas).
        decodes: number of decode servers, or of replicas.
        pulls: whether a server may pull cached KV of a prompt from another server.
    """

    name: str
    prefills: int
    decodes: int
    routing: Routing
    disaggregate: Disaggregate
    pulls: bool

    @property
    def arrangement(self) -> str:
        """The numbers of servers as text, such as "4 replicas" or "1P3D"."""
        if not self.is_split:
            return f"{self.decodes} replicas"
        return f"{self.prefills}P{self.decodes}D"

    @property
    def is_split(self) -> bool:
        return self.prefills > 0

    def command(self, model: str) -> str:
        """Return the command that starts the deployment on one host."""
        if not self.is_split:
            return (
                f"baton serve {model} --count {self.decodes} --routing {self.routing}"
            )
        return (
            f"baton up {model} --prefill.count {self.prefills} "
            f"--decode.count {self.decodes} --routing {self.routing} "
            f"--disaggregate {self.disaggregate}"
        )


def deployments(num_servers: int) -> list[Deployment]:
    """Return all deployments of this number of servers, the simplest first."""
    listed = [
        _replicas(num_servers, "round_robin", pulls=False),
        _replicas(num_servers, "auto", pulls=True),
    ]
    policies: tuple[Disaggregate, ...] = ("always", "auto")
    for prefills in range(1, num_servers):
        for disaggregate in policies:
            decodes = num_servers - prefills
            listed.append(split(prefills, decodes, disaggregate))
    return listed


def arrangements(num_servers: int) -> list[Deployment]:
    """Return the deployments for which corrections are measured.

    One deployment is replicas with round-robin routing. The others are the splits with
    one prefill server, with one decode server, and with about equal numbers of both.
    Another split uses the correction of the split with the closest number of prefill
    servers.
    """
    numbers = sorted({1, num_servers // 2, num_servers - 1})
    splits = [split(number, num_servers - number, "always") for number in numbers]
    return [deployments(num_servers)[0], *splits]


def split(prefills: int, decodes: int, disaggregate: Disaggregate) -> Deployment:
    """Return a deployment with separate prefill and decode servers."""
    name = f"{prefills}P{decodes}D {disaggregate}"
    return Deployment(name, prefills, decodes, "auto", disaggregate, pulls=True)


def _replicas(count: int, routing: Routing, *, pulls: bool) -> Deployment:
    title = "round robin" if routing == "round_robin" else f"routing {routing}"
    return Deployment(f"{count} replicas, {title}", 0, count, routing, "never", pulls)
