"""What NetworkPolicies let through, by their published rules; of pods and of addresses outside, not of namespaces."""

from support.node import Object

Labels = dict[str, str]
NAMED = {"grpc": 7717, "http": 7718}
"""The coordinator's ports."""


def policies_of(objects: list[Object], pod: Labels, direction: str) -> list[Object]:
    """Those that say what such a pod may reach (`Egress`), or may be reached by (`Ingress`)."""
    specs = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    return [spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], pod)]


def selects(selector: Object, pod: Labels) -> bool:
    """Whether a selector with labels, or with `In`, finds such a pod."""
    wanted = selector.get("matchLabels", {})
    among = {one["key"]: one["values"] for one in selector.get("matchExpressions", ())}
    return wanted.items() <= pod.items() and all(pod.get(key) in values for key, values in among.items())


def may_reach(objects: list[Object], pod: Labels, other: Labels | None, port: int) -> bool:
    """Whether such a pod reaches another one, or (None) an address outside, at a TCP port."""
    if not _lets(policies_of(objects, pod, "Egress"), "egress", "to", other, port):
        return False
    return other is None or _lets(policies_of(objects, other, "Ingress"), "ingress", "from", pod, port)


def _lets(specs: list[Object], rules: str, peers: str, other: Labels | None, port: int) -> bool:
    return not specs or any(
        (peers not in rule or any(_is(peer, other) for peer in rule[peers]))
        and ("ports" not in rule or any(_is_port(one, port) for one in rule["ports"]))
        for spec in specs
        for rule in spec[rules]
    )


def _is(peer: Object, other: Labels | None) -> bool:
    return other is not None and "podSelector" in peer and selects(peer["podSelector"], other)


def _is_port(one: Object, port: int) -> bool:
    return NAMED.get(one["port"], one["port"]) == port and one.get("protocol") != "UDP"
