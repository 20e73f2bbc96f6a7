"""Ray's PrefixCacheAffinityRouter for our calls: it looks for `.prompt` or `.messages` of an argument, ours are dicts.

Overrides, Ray 2.60.0 (tests/contracts/test_router_contracts.py holds the private names):
    _extract_text_from_request   reads the body of a turn
    choose_replicas, on_request_routed   a call without text (probes, the side channel) goes by two random choices:
                                         Ray's would divide by the length of its text
"""

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica


class PrefixAffinityRouter(PrefixCacheAffinityRouter):
    """Sends a prompt to the replica that has seen its longest prefix, by Ray's own algorithm."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        for argument in pending_request.args:
            if isinstance(argument, dict):
                prompt = argument.get("messages") or argument.get("prompt")
                if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
                    return " ".join(map(str, prompt))  # token ids: any text that begins alike where they do
                return str(self._normalize_prompt_to_string(prompt))
        return ""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray's choice for a call with text, else two random choices."""
        if pending_request is None or not self._extract_text_from_request(pending_request):
            by_load: list[list[RunningReplica]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
                self, candidate_replicas, pending_request
            )
            return by_load
        by_prefix: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return by_prefix

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Remember the prompt, if there is one."""
        if self._extract_text_from_request(pending_request):
            super().on_request_routed(pending_request, replica_id, result)
