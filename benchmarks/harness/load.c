// Load generator: CLIENTS keep-alive connections, each posting one streaming chat request after another.
//
//   load SECONDS WARMUP CLIENTS MODEL MAX_TOKENS MIN_CHUNKS PORT...
//
// A prompt is one of 16 system messages of about 2.2 KB and a question that never repeats. Prints one JSON
// object: requests, warm-up included and without it, their rate, milliseconds to the first text, to the end
// and between events, and errors. One thread on epoll, so that it costs little beside the server under test.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { NUM_GROUPS = 16, WORDS_PER_GROUP = 330, MAX_FIGURES = 4000000, MAX_ERRORS = 500, BUFFER = 65536 };

typedef struct {
    int socket, port;
    int busy, saw_head, saw_text, num_events;
    double sent_at, first_at, last_at;
    char tail[5];  // the last bytes received: a chunked body ends in "0\r\n\r\n"
} Client;

typedef struct {
    float *values;
    int count;
} Figures;

static Figures first_times, end_times, gaps;
static char groups[NUM_GROUPS][3000];
static const char *model;
static int max_tokens, min_events, epoll_fd, num_errors, num_done;
static char last_error[300];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what, const char *text, int length) {
    num_errors++;
    snprintf(last_error, sizeof last_error, "%s: %.*s", what, length > 200 ? 200 : length, text);
    for (char *c = last_error; *c; c++)
        if (*c == '"' || *c == '\\' || *c < ' ') *c = ' ';
}

static void add(Figures *figures, double seconds) {
    if (figures->count < MAX_FIGURES) figures->values[figures->count++] = seconds;
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static double quantile_ms(Figures *figures, double share) {
    if (!figures->count) return 0;
    int index = share * figures->count;
    return 1000 * figures->values[index < figures->count ? index : figures->count - 1];
}

static int dial(Client *client) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(client->port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    client->socket = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(client->socket, (void *)&address, sizeof address)) {
        fail("connect", strerror(errno), 100);
        close(client->socket);
        return 0;
    }
    int on = 1;
    setsockopt(client->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(client->socket, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = client};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, client->socket, &event);
    return 1;
}

static void post(Client *client) {
    char body[4096], message[5000];
    int length = snprintf(
        body, sizeof body,
        "{\"model\":\"%s\",\"stream\":true,\"max_tokens\":%d,\"messages\":["
        "{\"role\":\"system\",\"content\":\"%s\"},{\"role\":\"user\",\"content\":\"q %ld%ld\"}]}",
        model, max_tokens, groups[random() % NUM_GROUPS], random(), random());
    int head = snprintf(
        message, sizeof message,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
        "content-length: %d\r\n\r\n",
        client->port, length);
    memcpy(message + head, body, length);
    client->sent_at = now();
    client->busy = 1;
    client->saw_head = client->saw_text = client->num_events = 0;
    memset(client->tail, 0, sizeof client->tail);
    if (send(client->socket, message, head + length, MSG_NOSIGNAL) != head + length) fail("send", "short", 5);
}

// Whether any event brings text: a first event that only names the role is no token.
static int has_text(char *data, int length) {
    static const char key[] = "\"content\":\"";
    int size = sizeof key - 1;
    for (char *at = data; (at = memmem(at, data + length - at, key, size)); at += size)
        if (at + size < data + length && at[size] != '"') return 1;
    return 0;
}

static int count_events(char *data, int length) {
    int count = 0;
    for (char *at = data; (at = memmem(at, data + length - at, "data:", 5)); at += 5) count++;
    return count;
}

static void keep_tail(Client *client, const char *data, int length) {
    int size = sizeof client->tail, fresh = length > size ? size : length;
    memmove(client->tail, client->tail + fresh, size - fresh);
    memcpy(client->tail + size - fresh, data + length - fresh, fresh);
}

int main(int argc, char **argv) {
    if (argc < 8) {
        fprintf(stderr, "usage: load SECONDS WARMUP CLIENTS MODEL MAX_TOKENS MIN_CHUNKS PORT...\n");
        return 2;
    }
    double seconds = atof(argv[1]), begin = now() + atof(argv[2]), end = begin + seconds;
    int num_clients = atoi(argv[3]), num_ports = argc - 7, live = 0;
    model = argv[4];
    max_tokens = atoi(argv[5]);
    min_events = atoi(argv[6]);
    srandom(1);
    const char *words[] = {"alpha", "bravo", "charlie", "delta", "echo",   "foxtrot",
                           "golf",  "hotel", "india",   "juliet", "kilo", "lima"};
    for (int group = 0; group < NUM_GROUPS; group++)
        for (int word = 0, at = 0; word < WORDS_PER_GROUP; word++)
            at += sprintf(groups[group] + at, "%s ", words[random() % 12]);
    first_times.values = malloc(sizeof(float) * MAX_FIGURES);
    end_times.values = malloc(sizeof(float) * MAX_FIGURES);
    gaps.values = malloc(sizeof(float) * MAX_FIGURES);
    epoll_fd = epoll_create1(0);
    Client *clients = calloc(num_clients, sizeof *clients);
    // Clients begin one by one over the first half of the warm-up: begun at once they would ask at once for
    // ever, as all answers take the same time.
    double start = now(), pause = atof(argv[2]) / 2 / num_clients;
    int num_begun = 0;
    static char data[BUFFER + 1];
    while ((live > 0 || num_begun < num_clients) && now() < end + 10 && num_errors < MAX_ERRORS) {
        while (num_begun < num_clients && now() >= start + num_begun * pause) {
            Client *client = &clients[num_begun];
            client->port = atoi(argv[7 + num_begun++ % num_ports]);
            if (!dial(client)) continue;
            live++;
            post(client);
        }
        struct epoll_event events[128];
        int count = epoll_wait(epoll_fd, events, 128, num_begun < num_clients ? 1 : 200);
        for (int i = 0; i < count; i++) {
            Client *client = events[i].data.ptr;
            int length = recv(client->socket, data, BUFFER, 0);
            if (length < 0 && errno == EAGAIN) continue;
            double at = now();
            if (length <= 0) {
                if (client->busy) fail("closed in mid-stream", "", 0);
                close(client->socket);
                if (at > end || !dial(client)) live--;
                else post(client);
                continue;
            }
            if (!client->saw_head) {
                client->saw_head = 1;
                if (strncmp(data, "HTTP/1.1 200", 12)) fail("answer", data, length);
            }
            int num_events = count_events(data, length);
            client->num_events += num_events;
            if (num_events && (client->saw_text || has_text(data, length))) {
                if (!client->saw_text) client->first_at = at;
                else if (client->sent_at >= begin && at < end) add(&gaps, at - client->last_at);
                client->saw_text = 1;
                client->last_at = at;
            }
            keep_tail(client, data, length);
            if (memcmp(client->tail, "0\r\n\r\n", 5)) continue;
            if (client->num_events < min_events) fail("too few events", "", 0);
            else if (client->sent_at >= begin && at <= end) {
                add(&first_times, client->first_at - client->sent_at);
                add(&end_times, at - client->sent_at);
            }
            client->busy = 0;
            num_done++;
            if (at > end) {
                live--;
                close(client->socket);
            } else post(client);
        }
    }
    Figures *all[] = {&first_times, &end_times, &gaps};
    for (int i = 0; i < 3; i++) qsort(all[i]->values, all[i]->count, sizeof(float), ascending);
    printf(
        "{\"all_requests\": %d, \"requests\": %d, \"requests_per_s\": %.1f, \"ttft_p50_ms\": %.3f, \"ttft_p99_ms\": %.3f, "
        "\"e2e_p50_ms\": %.3f, \"gap_p50_ms\": %.3f, \"gap_p99_ms\": %.3f, \"errors\": %d, "
        "\"last_error\": \"%s\"}\n",
        num_done, end_times.count, end_times.count / seconds, quantile_ms(&first_times, .5),
        quantile_ms(&first_times, .99), quantile_ms(&end_times, .5), quantile_ms(&gaps, .5), quantile_ms(&gaps, .99), num_errors, last_error);
    return 0;
}
