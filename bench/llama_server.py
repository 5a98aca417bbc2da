"""llama.cpp's server as the package xllamacpp has it, compiled by others for AVX2: `serve.py --package` starts it. Its first line of output is its
address.

    bench/llama_server.py MODEL.gguf THREADS SLOTS CONTEXT FLASH UNIFIED

It has the settings that llama-server has by default, but for these and for the user interface, and its memory of earlier prompts beyond the slots.
"""

import signal
import sys

import xllamacpp

model, threads, slots, context, flash, unified = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
kinds = xllamacpp.llama_flash_attn_type
params.flash_attn_type = {"auto": kinds.LLAMA_FLASH_ATTN_TYPE_AUTO, "on": kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED,
                          "off": kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED}[flash]
params.kv_unified = unified == "unified"
params.fit_params = params.ui = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.sigwait([signal.SIGTERM, signal.SIGINT])
