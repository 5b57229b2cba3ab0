/* A libnvidia-ml.so.1 whose devices say what a test told them to, and which counts what it is asked.
 *
 * stub_set(device, key, value) sets what a device says; a key "rc:<function>" is the code that function returns.
 * Device -1 stands for the library itself. stub_calls(function) says how often a function was called.
 */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, GPU_IS_LOST = 15, MOST = 256, DEVICES = 4 };

typedef unsigned long long u64;
typedef struct { int number; } device_t;

static device_t devices[DEVICES] = {{0}, {1}, {2}, {3}};
static const char *uuids[DEVICES] = {
    "GPU-00000000-aaaa-0000-0000-000000000000", "GPU-11111111-bbbb-0000-0000-000000000000",
    "GPU-11112222-cccc-0000-0000-000000000000", "MIG-33333333-dddd-0000-0000-000000000000",
};
static struct { int device; char key[64]; long long value; } values[MOST];
static struct { char name[64]; int count; } calls[MOST];

void stub_set(int device, const char *key, long long value) {
    int place = 0;
    while (values[place].key[0] && (values[place].device != device || strcmp(values[place].key, key))) place++;
    values[place].device = device;
    strncpy(values[place].key, key, 63);
    values[place].value = value;
}

static long long get(int device, const char *key, long long otherwise) {
    for (int place = 0; place < MOST && values[place].key[0]; place++)
        if (values[place].device == device && !strcmp(values[place].key, key)) return values[place].value;
    return otherwise;
}

static int called(const char *name) {
    int place = 0;
    while (calls[place].name[0] && strcmp(calls[place].name, name)) place++;
    strncpy(calls[place].name, name, 63);
    return ++calls[place].count;
}

int stub_calls(const char *name) {
    for (int place = 0; place < MOST && calls[place].name[0]; place++)
        if (!strcmp(calls[place].name, name)) return calls[place].count;
    return 0;
}

static int enter(int device, const char *name) {
    char key[64] = "rc:";
    called(name);
    if (device >= 0 && get(device, "lost", 0)) return GPU_IS_LOST;
    return (int)get(device, strncat(key, name, 60), SUCCESS);
}
#define ENTER(device) do { int rc = enter(device, __func__); if (rc) return rc; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(-1); return SUCCESS; }
int nvmlShutdown(void) { ENTER(-1); return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(-1); *count = DEVICES - 1; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    ENTER(-1);
    if (index >= DEVICES - 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
    ENTER(-1);
    for (int number = 0; number < DEVICES; number++)
        if (!strcmp(uuids[number], uuid)) { *device = &devices[number]; return SUCCESS; }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned length) {
    ENTER(device->number);
    strncpy(uuid, uuids[device->number], length);
    return SUCCESS;
}

int nvmlDeviceGetIndex(device_t *device, unsigned *index) {
    ENTER(device->number);
    *index = (unsigned)device->number;
    return SUCCESS;
}

int nvmlDeviceGetName(device_t *device, char *name, unsigned length) {
    ENTER(device->number);
    strncpy(name, "Stub \"H\" 200", length);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t *device, unsigned *rates) {
    ENTER(device->number);
    rates[0] = (unsigned)get(device->number, "busy", 0);
    rates[1] = 77;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t *device, u64 *memory) {
    ENTER(device->number);
    memory[0] = 80ull << 30;
    memory[2] = (u64)get(device->number, "used", 0);
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}
