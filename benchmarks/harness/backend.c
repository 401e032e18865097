// Mock OpenAI-compatible backend: streams NUM_TOKENS chunks, ITL_US microseconds apart, on every port.
//
//   backend ITL_US NUM_TOKENS PORT...
//
// Answers /v1/models, /metrics and a small JSON for anything else, so that routers take it for a server of
// theirs. One thread on epoll.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TOKENS = 256, MAX_CHUNK = 512, CAPACITY = 65536 };
#define LISTENER (1ULL << 63)

typedef struct Connection {
    int socket, length, token;  // token < 0: no stream
    uint64_t due_us;
    char *buffer;
    struct Connection *next;  // in the list of streams
} Connection;

static int num_tokens;
static long itl_us;
static Connection *streams;
static char chunks[MAX_TOKENS][MAX_CHUNK];
static int chunk_lengths[MAX_TOKENS];

static const char *HEAD =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char *END = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char *MODELS =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\","
    "\"max_model_len\":32768}]}";
static const char *ANYTHING =
    "{\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"is_generation\":true,\"model_type\":\"llama\","
    "\"max_model_len\":32768,\"tp_size\":1,\"dp_size\":1,\"status\":\"ready\"}";

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000ULL + t.tv_nsec / 1000;
}

static void write_all(int socket, const char *data, int length) {
    while (length > 0) {
        int sent = send(socket, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) continue;
        if (sent < 0) return;
        data += sent;
        length -= sent;
    }
}

static void answer(int socket, const char *json) {
    char message[2048];
    int length = snprintf(
        message, sizeof message,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(json), json);
    write_all(socket, message, length);
}

static void make_chunks(void) {
    for (int i = 0; i < num_tokens; i++) {
        char event[400];
        int length = snprintf(
            event, sizeof event,
            "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
            "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"tok%d \"},"
            "\"finish_reason\":%s}]}\n\n",
            i ? "" : "\"role\":\"assistant\",", i, i < num_tokens - 1 ? "null" : "\"stop\"");
        chunk_lengths[i] = snprintf(chunks[i], MAX_CHUNK, "%x\r\n%s\r\n", length, event);
    }
}

// The first whole request in the buffer: its length, or 0 while it is not all there.
static int request_length(Connection *connection) {
    connection->buffer[connection->length] = 0;
    char *end = strstr(connection->buffer, "\r\n\r\n");
    if (!end) return 0;
    char *header = strcasestr(connection->buffer, "transfer-encoding: chunked");
    if (header && header < end) {
        char *last = strstr(end, "\r\n0\r\n\r\n");
        return last ? last + 7 - connection->buffer : 0;
    }
    header = strcasestr(connection->buffer, "content-length:");
    int total = end + 4 - connection->buffer + (header && header < end ? atoi(header + 15) : 0);
    return connection->length < total ? 0 : total;
}

static void serve(Connection *connection) {
    int length;
    while (connection->token < 0 && (length = request_length(connection))) {
        char *request = connection->buffer;
        int posted = !strncmp(request, "POST /v1/chat/completions ", 26) || !strncmp(request, "POST /v1/completions ", 21);
        int streamed = posted && (memmem(request, length, "\"stream\":true", 13) || memmem(request, length, "\"stream\": true", 14));
        int models = !strncmp(request, "GET /v1/models", 14), metrics = !strncmp(request, "GET /metrics", 12);
        memmove(request, request + length, connection->length - length);
        connection->length -= length;
        if (streamed) {
            write_all(connection->socket, HEAD, strlen(HEAD));
            connection->token = 0;
            connection->due_us = now_us() + itl_us;
            connection->next = streams;
            streams = connection;
        } else if (models) answer(connection->socket, MODELS);
        else if (metrics) answer(connection->socket, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n");
        else answer(connection->socket, ANYTHING);
    }
}

static void drop(Connection *connection) {
    for (Connection **at = &streams; *at; at = &(*at)->next)
        if (*at == connection) {
            *at = connection->next;
            break;
        }
    close(connection->socket);
    free(connection->buffer);
    free(connection);
}

static void stream(void) {
    uint64_t at = now_us();
    Connection **place = &streams;
    while (*place) {
        Connection *connection = *place;
        if (connection->due_us <= at) {
            write_all(connection->socket, chunks[connection->token], chunk_lengths[connection->token]);
            connection->token++;
            connection->due_us += itl_us;
            if (connection->token == num_tokens) {
                write_all(connection->socket, END, strlen(END));
                connection->token = -1;
                *place = connection->next;
                serve(connection);
                continue;
            }
        }
        place = &connection->next;
    }
}

int main(int argc, char **argv) {
    if (argc < 4 || atoi(argv[2]) > MAX_TOKENS) {
        fprintf(stderr, "usage: backend ITL_US NUM_TOKENS PORT...   (at most %d tokens)\n", MAX_TOKENS);
        return 2;
    }
    itl_us = atol(argv[1]);
    num_tokens = atoi(argv[2]);
    make_chunks();
    int epoll_fd = epoll_create1(0), on = 1;
    for (int i = 3; i < argc; i++) {
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[i]))};
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1024)) {
            perror("bind");
            return 1;
        }
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = LISTENER | listener};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    }
    for (;;) {
        struct epoll_event events[256];
        int count = epoll_wait(epoll_fd, events, 256, streams ? (itl_us ? 1 : 0) : 1000);
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 & LISTENER) {
                int accepted;
                while ((accepted = accept4((int)events[i].data.u64, 0, 0, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                    Connection *connection = calloc(1, sizeof *connection);
                    connection->socket = accepted;
                    connection->token = -1;
                    connection->buffer = malloc(CAPACITY + 1);
                    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
                    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, accepted, &event);
                }
                continue;
            }
            Connection *connection = events[i].data.ptr;
            int length = recv(connection->socket, connection->buffer + connection->length, CAPACITY - connection->length, 0);
            if (length < 0 && errno == EAGAIN) continue;
            if (length <= 0) drop(connection);
            else {
                connection->length += length;
                serve(connection);
            }
        }
        stream();
    }
}
