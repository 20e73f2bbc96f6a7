"""What `serve deploy` and `serve status` do, in a process of its own: Ray's dashboard is a dozen processes.

It connects to the Ray cluster in RAY_ADDRESS; each line of its input is a Serve configuration, or empty; each line of
its output tells the applications, after that was done.
"""

import json
import os
import sys


def main() -> None:
    """Answer until the input ends."""
    import ray
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    ray.init(
        os.environ["RAY_ADDRESS"],
        namespace="serve",
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=os.environ["RAY_ADDRESS"].split(":")[0],
    )
    client = None
    told: dict[str, object] = {}
    for line in sys.stdin:
        if line.strip():
            config = ServeDeploySchema.model_validate_json(line)
            if client is None:
                client = serve_start(
                    http_options=config.http_options.model_dump(),
                    proxy_location=config.proxy_location,
                    global_logging_config=config.logging_config,
                )
            client.deploy_apps(config)
        if client is not None:
            told = client.get_serve_details()["applications"]
        sys.__stdout__.write(json.dumps(told, default=str) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
