/* Streams, events, captures and graphs. All work is over when the call that starts it returns, so
   waiting is nothing but a check that no capture forbids it. A replay does nothing. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "standin.h"

struct capture { /* later the graph, and the executable graph; never freed */
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    int active;
    int nodes;
};
struct stream {
    struct capture *capture;
};
struct event {
    double seconds;
    struct capture *capture; /* in which it was recorded last */
};

static struct stream default_stream;
static atomic_ullong last_id;
static atomic_int global_captures;                  /* under way in any thread, in the mode `global` */
static __thread int own_captures;                   /* that this thread has begun, and not `relaxed` */
static __thread enum cudaStreamCaptureMode own_mode /* of this thread's calls */ = cudaStreamCaptureModeGlobal;

static struct stream *stream_of(cudaStream_t stream) {
    int is_default = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? &default_stream : (struct stream *)stream;
}

/* The capture that is under way on a stream, or NULL. */
struct capture *standin_capture_of(cudaStream_t stream) {
    struct capture *capture = stream_of(stream)->capture;
    return capture && capture->active ? capture : NULL;
}

/* Adds a node to the graph that is being captured; returns 0 if the stream captures none. */
int standin_add_node(cudaStream_t stream) {
    struct capture *capture = standin_capture_of(stream);
    if (capture) capture->nodes++;
    return capture != NULL;
}

/* Whether a capture makes allocations and waiting an error in this thread: CUDA's rules for modes. */
static int capture_forbids(void) {
    if (own_mode == cudaStreamCaptureModeRelaxed) return 0;
    return own_captures > 0 || (own_mode == cudaStreamCaptureModeGlobal && global_captures > 0);
}

void standin_synchronises(const char *name) {
    if (capture_forbids()) standin_violation("synchronising call in a capture", "%s", name);
}

/* Torch allocates for the pool of a graph in the mode `relaxed`, which CUDA allows. */
void standin_allocates(const char *name) {
    if (capture_forbids())
        standin_violation("allocation in a capture", "%s", name);
    else if (own_captures > 0)
        standin_count(COUNT_POOL_ALLOCATIONS);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = own_mode;
    own_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* --- captures */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (stream_of(stream) == &default_stream) return cudaErrorStreamCaptureUnsupported;
    if (standin_capture_of(stream)) return cudaErrorIllegalState;
    struct capture *capture = calloc(1, sizeof *capture);
    capture->id = atomic_fetch_add(&last_id, 1) + 1;
    capture->mode = mode;
    capture->active = 1;
    stream_of(stream)->capture = capture;
    if (mode == cudaStreamCaptureModeGlobal) global_captures++;
    if (mode != cudaStreamCaptureModeRelaxed) own_captures++;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    struct capture *capture = standin_capture_of(stream);
    if (!capture) return cudaErrorIllegalState;
    capture->active = 0;
    if (capture->mode == cudaStreamCaptureModeGlobal) global_captures--;
    if (capture->mode != cudaStreamCaptureModeRelaxed) own_captures--;
    standin_count(COUNT_GRAPHS);
    *graph = (cudaGraph_t)capture;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
    *out = standin_capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *num_dependencies
) {
    struct capture *capture = standin_capture_of(stream);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = (cudaGraph_t)capture;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (num_dependencies) *num_dependencies = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = ((struct capture *)graph)->nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    *out = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    if (standin_capture_of(stream)) standin_violation("replay in a capture", "cudaGraphLaunch");
    standin_count(COUNT_REPLAYS);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }

/* --- streams */

cudaError_t cudaStreamCreate(cudaStream_t *out) {
    *out = calloc(1, sizeof(struct stream));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    return cudaStreamCreate(out);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) {
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (standin_capture_of(stream))
        standin_violation("synchronising call in a capture", "cudaStreamSynchronize of the captured stream");
    else
        standin_synchronises("cudaStreamSynchronize");
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    standin_synchronises("cudaStreamQuery");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    standin_synchronises("cudaDeviceSynchronize");
    return cudaSuccess;
}

/* A stream that waits for a capture's event becomes part of the capture. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct capture *capture = ((struct event *)event)->capture;
    if (capture && capture->active && !standin_capture_of(stream)) stream_of(stream)->capture = capture;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (!standin_capture_of(stream)) function(data);
    return cudaSuccess;
}

/* --- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    *out = calloc(1, sizeof(struct event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(struct event *)event = (struct event){now.tv_sec + 1e-9 * now.tv_nsec, standin_capture_of(stream)};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    standin_synchronises("cudaEventQuery");
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    standin_synchronises("cudaEventSynchronize");
    return cudaSuccess;
}

/* The host's time between two records, and never 0: rates are divided by it. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    double seconds = ((struct event *)end)->seconds - ((struct event *)start)->seconds;
    *milliseconds = 1e3 * seconds + 1e-6;
    return cudaSuccess;
}
