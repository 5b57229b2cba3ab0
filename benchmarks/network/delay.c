/* A wire between two network namespaces that takes time and loses packets, for kernels without netem.

   usage: delay NAMESPACE DEVICE NAMESPACE DEVICE

   Makes a TUN device in each namespace and carries packets from one to the other. Each line on standard input is
   "MICROSECONDS PER_MILLION": the delay of one way, and how many packets of a million are lost; "ready" is printed when
   the first is in force. Ends with standard input. The rate is left to `tc` on the devices.

   Large packets travel unsegmented (TSO) while none are lost: a loss is one of a packet of the size of the MTU. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define LARGEST 70000
#define SLICE 64 /* packets that are read from one end in a row */

struct packet {
    struct packet *next;
    int64_t due_ns;
    size_t size;
    char data[];
};

struct way {
    int from, to;
    struct packet *first, *last;
};

static int64_t delay_ns;
static double lost;

static void die(const char *what) {
    fprintf(stderr, "delay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_tun(const char *namespace, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int ns = open(path, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET)) die(path);
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &request)) die("TUNSETIFF");
    return fd;
}

static void set_offload(const struct way *ways) {
    unsigned large = lost > 0 ? 0 : TUN_F_TSO4 | TUN_F_TSO6;
    for (int i = 0; i < 2; i++)
        if (ioctl(ways[i].from, TUNSETOFFLOAD, TUN_F_CSUM | large)) die("TUNSETOFFLOAD");
}

/* Read what a line says; 0 at the end of the input. */
static int hear(const struct way *ways) {
    char line[256];
    ssize_t size = read(0, line, sizeof line - 1);
    if (size <= 0) return 0;
    line[size] = 0;
    long long delay_us;
    double per_million;
    if (sscanf(line, "%lld %lf", &delay_us, &per_million) != 2) die("a line that is not two numbers");
    delay_ns = delay_us * 1000;
    lost = per_million / 1e6;
    set_offload(ways);
    return 1;
}

static void take_in(struct way *way) {
    static char buffer[LARGEST];
    for (int i = 0; i < SLICE; i++) {
        ssize_t size = read(way->from, buffer, sizeof buffer);
        if (size <= 0) return;
        if (lost > 0 && drand48() < lost) continue;
        struct packet *packet = malloc(sizeof *packet + size);
        if (!packet) die("malloc");
        packet->next = NULL;
        packet->due_ns = now_ns() + delay_ns;
        packet->size = size;
        memcpy(packet->data, buffer, size);
        if (way->first) way->last->next = packet;
        else way->first = packet;
        way->last = packet;
    }
}

static void hand_out(struct way *way) {
    for (struct packet *packet; (packet = way->first) && packet->due_ns <= now_ns();) {
        if (write(way->to, packet->data, packet->size) < 0 && errno == EAGAIN) return;
        way->first = packet->next;
        free(packet);
    }
}

static int64_t wait_ns(const struct way *ways) {
    int64_t due = INT64_MAX;
    for (int i = 0; i < 2; i++)
        if (ways[i].first && ways[i].first->due_ns < due) due = ways[i].first->due_ns;
    if (due == INT64_MAX) return 1000000000;
    int64_t left = due - now_ns();
    return left > 0 ? left : 0;
}

int main(int count, char **arguments) {
    if (count != 5) die("usage: delay NAMESPACE DEVICE NAMESPACE DEVICE");
    int a = open_tun(arguments[1], arguments[2]), b = open_tun(arguments[3], arguments[4]);
    struct way ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    setpriority(PRIO_PROCESS, 0, -20); /* late packets would look like a longer way */
    if (!hear(ways)) return 0;
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t left = wait_ns(ways);
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        struct pollfd fds[3] = {{0, POLLIN, 0}, {a, POLLIN, 0}, {b, POLLIN, 0}};
        if (ppoll(fds, 3, &timeout, NULL) < 0 && errno != EINTR) die("ppoll");
        if (fds[0].revents && !hear(ways)) return 0;
        for (int i = 0; i < 2; i++) {
            if (fds[i + 1].revents) take_in(&ways[i]);
            hand_out(&ways[i]);
        }
    }
}
