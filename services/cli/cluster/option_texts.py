"""The texts of the services' options: help, groups of the help, and known values."""

from __future__ import annotations

from shared.config import (
    ATTENTIONS,
    DATA_PLANE_SECURITIES,
    EXECUTORS,
    EXPERT_KERNELS,
    EXPERT_SPLITS,
    KV_COMPRESSIONS,
    KV_TRANSPORTS,
    LOAD_FORMATS,
    LOG_FORMATS,
    LOG_LEVELS,
    RESIDENCIES,
    TOOL_FORMATS,
    WEIGHT_FORMS,
)
from shared.messages import WORKER_ROLES
from shared.numerics import ACTIVATIONS, KV_DTYPES, MODES

PANELS = {
    "Connections": (
        *("nats_url", "nats_ca", "nats_cert", "nats_key", "is_nats_tls_first", "worker_nats_url"),
        *("redis_url", "redis_read_url", "redis_ca", "redis_cert", "redis_key"),
    ),
    "Process": (
        *("process_id", "instance", "role", "announce", "region", "region_classes"),
        *("trace_region", "site"),
        "drain_timeout_s",
        *("lame_duck_s", "metrics_host", "metrics_port", "log_level", "log_format"),
        *("num_threads", "state_dir"),
    ),
    "Model": (
        *("model_dir", "model_name", "device", "budget", "dtype", "kv_dtype", "weights"),
        *(
            "load_format",
            "mode",
            "executor",
            "attention",
            "expert_kernels",
            "tool_format",
            "chat_template",
            "response_template",
            "max_loaded_models",
        ),
        *("is_parked", "parked_weights", "parked_weights_bytes"),
    ),
    "HTTP": (
        *("http_host", "http_port", "http_cert", "http_key", "page", "cors_origin", "padding"),
        *("request_timeout_s", "write_timeout_s", "keep_alive_s", "fault_socket"),
    ),
    "Secrets": ("operator_token", "metrics_token", "cluster_secret", "fault_token"),
    "Limits": (
        *("default_max_tokens", "max_requests", "preparations_per_tenant", "max_body_bytes"),
        *("max_image_body_bytes", "max_images", "max_image_pixels", "image_host"),
        "max_pixel_bytes",
        *("max_tenant_pixel_bytes", "max_unsent_bytes", "max_tenant_unsent_bytes"),
        *("response_ttl_s", "receipt_ttl_s", "max_receipt_bytes"),
        *("max_stored_response_bytes", "max_stored_prefix_bytes", "max_queued_requests"),
        *("max_queued_tokens", "max_prefixes_per_tenant", "prefix_ttl_s", "max_context_tokens"),
        *("max_batch_tokens", "max_sequences"),
    ),
    "Placement": (
        *("local_prefill_tokens", "max_local_prefill_tokens", "automatic_roles"),
        *("min_role_workers", "role_change_min_s", "target_itl_s", "residency", "wake_ttft_s"),
        "cold_start_s",
        *("linked_site", "kv_networks", "stale_s"),
    ),
    "KV cache": (
        *("kv_cache_bytes", "kv_floor_bytes", "kv_ceiling_bytes", "block_size", "gpu_memory"),
        *("max_reserved_share", "max_pinned_share", "zero_freed_blocks", "image_cache_bytes"),
    ),
    "KV data plane": (
        *("data_plane_host", "data_plane_port", "data_plane_advertised_host"),
        *("data_plane_security", "kv_compression", "kv_transport"),
    ),
    "Ranks": (
        *("tp", "pp", "experts", "activations", "remote_ranks", "rank_host", "worker", "ranks"),
        *("is_trusted_network", "device_process"),
    ),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
VALUES: dict[str, tuple[str, ...]] = {
    "activations": ACTIVATIONS,
    "announce": tuple(WORKER_ROLES),
    "automatic_roles": ("on", "off"),
    "data_plane_security": DATA_PLANE_SECURITIES,
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "executor": EXECUTORS,
    "attention": ATTENTIONS,
    "expert_kernels": EXPERT_KERNELS,
    "experts": EXPERT_SPLITS,
    "kv_compression": KV_COMPRESSIONS,
    "kv_transport": KV_TRANSPORTS,
    "kv_dtype": KV_DTYPES,
    "load_format": LOAD_FORMATS,
    "log_format": LOG_FORMATS,
    "log_level": LOG_LEVELS,
    "mode": MODES,
    "residency": RESIDENCIES,
    "tool_format": TOOL_FORMATS,
    "weights": WEIGHT_FORMS,
}
HELP = {
    "nats_url": "NATS server, with this process's credential: nats://ID:PASSWORD@HOST:PORT; or a "
    "comma list of the servers of a cluster, the nearest first.",
    "nats_ca": "PEM file of the authorities that may sign NATS's certificate, for tls:// URLs "
    "(default: those of the system).",
    "nats_cert": "PEM file of this process's certificate, if NATS requires one.",
    "nats_key": "PEM file of its private key.",
    "is_nats_tls_first": "Start with the TLS handshake (NATS: handshake_first).",
    "process_id": "Name of this process's credential (default: the NATS URL's user, or "
    "ROLE-<6 hex digits>).",
    "region": "Region of this process (data residency).",
    "region_classes": "As in hearth nats-config --class; repeatable.",
    "site": "Name of this site, if its NATS has links to others: hearth nats-config --link.",
    "linked_site": "A site to which this one has a link, so that `hearth status` says when it has "
    "never worked; WEIGHT is the share of queues here of all its requests, as of one tenant "
    "(default: 1). Repeatable.",
    "kv_networks": "Network of other sites' decode workers, such as 10.2.0.0/16; repeatable. "
    "The prefill workers here compute long prompts for these sites and push the KV there "
    "(default: for none).",
    "stale_s": "Seconds for which tenants of other sites are served after their home site was "
    "heard last.",
    "drain_timeout_s": "Seconds that a stop waits for running requests.",
    "metrics_host": "Listen address of --metrics-port.",
    "metrics_port": "Port with /healthz, /ready and /metrics of this process, without a token "
    "(default: none).",
    "log_level": "Least level of log lines: debug, info, warning or error.",
    "log_format": "Of log lines: json, text, or auto (text on a terminal, else JSON).",
    "redis_url": "Redis server: redis://:PASSWORD@HOST:PORT/0.",
    "redis_read_url": "Near replica of that Redis, for API keys (default: none). A key that it "
    "lacks is looked up in the Redis server.",
    "redis_ca": "PEM file of the authorities that may sign Redis's certificate, for rediss:// URLs "
    "(default: those of the system).",
    "redis_cert": "PEM file of this process's certificate, if Redis requires one.",
    "redis_key": "PEM file of its private key.",
    "model_dir": "Checkpoint directory in Hugging Face layout, or a hub id such as org/name; for a "
    "gateway also empty: it serves the models of the catalogue alone.",
    "max_loaded_models": "Models of the catalogue whose tokenizers stay loaded, beside those that "
    "requests use.",
    "model_name": "Model name for clients (default: the hub id, or the directory's name).",
    "http_host": "HTTP listen address.",
    "http_port": "HTTP listen port.",
    "http_cert": "PEM file of the gateway's certificate with its chain, for HTTPS (default: HTTP). "
    "It is loaded again when it changes.",
    "http_key": "PEM file of its private key.",
    "request_timeout_s": "Maximum duration of a request, in seconds.",
    "max_body_bytes": "Maximum size of a request body.",
    "max_image_body_bytes": "Maximum size of a body with images, for models that take images; the "
    "rest of the body is limited as others are.",
    "max_images": "Maximum images of a request.",
    "image_host": "Host such as images.example.com whose images the gateway fetches over HTTPS, or "
    "with http:// before it without TLS; repeatable (default: none).",
    "max_image_pixels": "Maximum pixels of an image, width times height, before it is decoded.",
    "max_pixel_bytes": "Maximum pixels of open requests in memory, until their answers end.",
    "max_tenant_pixel_bytes": "Maximum of those of one tenant.",
    "preparations_per_tenant": "Requests of a tenant that are decoded, rendered and tokenized at "
    "once; its further requests wait.",
    "max_requests": "Maximum concurrent requests; further requests are rejected with 429.",
    "default_max_tokens": "Tokens to generate for a request without max_tokens.",
    "lame_duck_s": "Seconds after SIGTERM in which /ready is 503 and requests are still served.",
    "write_timeout_s": "Seconds that a client may take no byte of its response.",
    "response_ttl_s": "Seconds for which responses of the Responses API are stored.",
    "receipt_ttl_s": "Seconds for which receipts of responses are held; 0: there are none.",
    "max_receipt_bytes": "Maximum memory for the receipts of all tenants.",
    "max_stored_response_bytes": "Maximum memory of Redis for stored responses of all tenants; 0: "
    "half of its maxmemory.",
    "max_stored_prefix_bytes": "The same for named prefixes; 0: a quarter of its maxmemory.",
    "keep_alive_s": "Seconds of silence before a stream sends its head, or an empty event.",
    "max_unsent_bytes": "Maximum output of one stream that its client has not read.",
    "max_tenant_unsent_bytes": "Maximum output that waits for all clients of a tenant.",
    "metrics_token": "Bearer token required for /metrics; empty: no authentication.",
    "operator_token": "Bearer token of operators, for /v1/cluster and its view on the page; empty: "
    "closed. Give it as HEARTH_OPERATOR_TOKEN.",
    "trace_region": "Region of the collector of traces and of its store: spans of tenants that are "
    "bound to other regions are not exported (default: the region of this gateway).",
    "page": "Serve the page with playground, cluster and timelines at /.",
    "fault_socket": "Socket of `hearth up`, which sets it: operators may kill and freeze its "
    "workers from the page. Only with an HTTP listen address on loopback (default: none).",
    "fault_token": "Token of that socket. Given as HEARTH_FAULT_TOKEN.",
    "tool_format": "template (a chat template without tools rejects requests that have them) or "
    "hermes: such a template gets tools, calls and results as text.",
    "chat_template": "File with the chat template of the gateway's own model, in place of those of "
    "its checkpoint.",
    "response_template": "How the model writes tool calls and reasoning: a file in the format of "
    "Hugging Face's response_template, the name of a family such as hermes, or off (default: by "
    "tokenizer_config.json, else by the chat template).",
    "cors_origin": "Origin such as https://app.example whose pages may call the gateway, or * for "
    "all; repeatable (default: none).",
    "padding": "Random padding in the events of Workers AI's streams, so that sizes of encrypted "
    "records do not show the lengths of tokens.",
    "max_queued_requests": "Maximum requests in the queue; further requests are rejected with 429.",
    "max_queued_tokens": "Maximum tokens of queued requests: prompts and max_tokens.",
    "local_prefill_tokens": "Uncached prompt tokens up to which decode always computes a prompt.",
    "max_local_prefill_tokens": "Above it, decode computes a prompt only if no prefill worker can.",
    "automatic_roles": "on: workers with the handlers of both roles change between prefill and "
    "decode as the work of a model asks for; off.",
    "min_role_workers": "Workers that automatic changes leave in each role, at least 1.",
    "role_change_min_s": "Seconds between two automatic changes of a model's workers.",
    "target_itl_s": "Seconds between two tokens that a decode worker shall not exceed: with longer "
    "steps it counts as full, when roles change and in the advice for an autoscaler.",
    "cold_start_s": "Seconds that a request waits for the first worker of its model, which an "
    "autoscaler starts: idle models then need none. 0: each needs one.",
    "residency": "demand: hosts keep the models hot whose use is expected soonest; lru: those used "
    "last.",
    "wake_ttft_s": "Seconds to the first token within which requests of a parked model gather, if "
    "waking it parks another one in use.",
    "cluster_secret": "Secret of all gateways and the index, not of workers: it keys the names of "
    "cached KV blocks, so that no worker can guess those of a tenant. Give it as "
    "HEARTH_CLUSTER_SECRET.",
    "max_prefixes_per_tenant": "Maximum prefix records per tenant in Redis.",
    "prefix_ttl_s": "Seconds from the last use of a prefix to the expiry of its record.",
    "announce": "Roles that a worker with both starts in: prefill, decode or both (default: all "
    "that it has). `hearth role` changes them.",
    "dtype": "auto (as in the checkpoint), bfloat16, float16 or float32.",
    "kv_dtype": "Of stored KV: auto (fp8 if the checkpoint declares it, else as activations), "
    "bf16, or fp8: e4m3 with the checkpoint's scales (1 without any), twice the tokens in equal "
    "memory.",
    "device": "auto (CUDA if there is a device), cpu, cuda or cuda:N.",
    "load_format": "auto (as in the directory) or dummy: seeded weights from config.json alone, "
    "for measurements.",
    "weights": "auto (compressed if the checkpoint is), dense, or compressed: matrices in about "
    "11.4 bits per weight on CPUs, 12.1 on CUDA, instead of 16, without loss.",
    "num_threads": "Math threads; 0 shares the cores of this host.",
    "worker_nats_url": "NATS server with the credential that all workers of the host share.",
    "budget": "DEVICE=SIZE|SHARE: memory that the models on a device may use, such as cpu=12GiB "
    "or cuda:0=45%; repeatable (default: half of this machine's memory, or on CUDA 0.9 of what is "
    "free).",
    "state_dir": "Folder for what is known of the models, and for the workers' logs (default: "
    "$XDG_STATE_HOME/hearth/hosts/ID).",
    "tp": "Tensor parallelism: rank processes that share each layer; 1, 2, 4 or 8.",
    "pp": "Pipeline parallelism: stages of consecutive layers, with TP ranks each.",
    "remote_ranks": "How many of those ranks, the last ones, `hearth rank` runs on other hosts.",
    "rank_host": "This host's address, at which ranks of other hosts join.",
    "is_trusted_network": "Let ranks of several hosts exchange activations and KV, which are not "
    "encrypted, over a network whose hosts may all read them.",
    "device_process": "Compute in a process of its own also with one rank: the worker outlives a "
    "crash or a hang of its device's driver. Not measured on a GPU.",
    "worker": "Process id of the worker (default: the NATS URL's user).",
    "ranks": "Number of its ranks on this host.",
    "mode": "exact: a token's bits depend neither on its batch nor on chunking, and only workers "
    "with equal bits share KV. fast: a resumed output may differ, and unlike hardware shares KV. "
    "auto: exact on CPUs, and on GPUs where that is proven and costs little.",
    "executor": "auto: on CUDA replays graphs of decode steps; plain: launches every kernel of "
    "every step.",
    "attention": "Attention of prompts on CUDA: this project's kernels (auto, triton), or "
    "cuDNN's (fast mode; not yet run).",
    "expert_kernels": "Experts of many rows on CUDA, fast mode: this project's kernels (auto, "
    "triton), or torch's grouped GEMM (not yet run).",
    "experts": "How ranks share a layer's experts. ep: each holds some of them; tp: each holds "
    "columns of all; auto: ep for 8 experts a rank and more. All give equal bits.",
    "activations": "plain, or bf16-exchange: ranks send sums of lanes in BF16, half the bytes for "
    "slow links; other bits, equal at every number of ranks, also one.",
    "block_size": "Tokens in a KV block (default: 16 on the CPU, 64 on CUDA; "
    "a model that has workers on both needs one size).",
    "kv_cache_bytes": "Memory for the KV cache (default: 256 MiB on the CPU; on CUDA 0.9 of "
    "what is free after weights and the largest step).",
    "kv_floor_bytes": "Memory that the KV cache has at least while the worker serves; it limits "
    "the context (default: what the context that the worker announces needs).",
    "kv_ceiling_bytes": "Memory to which the KV cache may grow (default: --kv-cache-bytes).",
    "gpu_memory": "Memory of the GPU that this worker may use in all, for weights, steps, graphs "
    "and KV: a size such as 36GiB, or a share such as 0.45 or 45% (default: what is free).",
    "is_parked": "Start in standby: with weights and kernels, but without a KV cache.",
    "parked_weights": "Where a worker on CUDA has its weights in standby: page-locked memory of "
    "the host, or the device.",
    "parked_weights_bytes": "Memory of this machine for the weights of parked models on CUDA "
    "(default: half of it, less the CPU's budget). Models beyond it keep theirs on the device; 0: "
    "all do.",
    "max_context_tokens": "Tokens of a sequence, at most (default: the model's context).",
    "max_batch_tokens": "Tokens computed in one step (default: 512 on the CPU; on CUDA 2048, and "
    "8192 for prefill alone).",
    "max_sequences": "Maximum concurrent sequences.",
    "max_reserved_share": "Share of the KV cache that waiting handoffs may hold.",
    "zero_freed_blocks": "Zero the KV of blocks that are no longer cached or in use.",
    "max_pinned_share": "Share of the KV cache that pinned prefixes may hold.",
    "image_cache_bytes": "Memory for encoded images.",
    "kv_compression": "BF16 KV over TCP: auto (compressed on links where that is faster) or off.",
    "kv_transport": "nixl: where both ends have its package and no security.",
    "data_plane_security": "Of KV and pixels over TCP: aead (encrypted), mac (authenticated) "
    "or none.",
    "data_plane_host": "Listen address for KV.",
    "data_plane_port": "Its TCP port; ranks and images take the next ones (default: free ports).",
    "data_plane_advertised_host": "Its address for others (default: the listen address, or this "
    "host's name).",
}
