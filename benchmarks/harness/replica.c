// Mock replica: speaks Headrace's own wire (a 4-byte length, then msgpack) on Unix sockets.
//
//   replica ITL_US NUM_TOKENS FIRST_TOKEN_ID HELLO_FILE...
//
// HELLO_FILE holds the framed greeting; the socket is made at HELLO_FILE with ".sock" appended. A request's
// first token comes ITL_US microseconds after it; from then on it gets one token in every Step that the
// connection's requests share, ITL_US apart, as from an engine that steps for all at once. The last token
// ends it with "length". One thread on epoll.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ID = 120, MAX_REQUESTS = 512, CAPACITY = 1 << 20, MAX_HELLO = 8192, OUTPUT_BYTES = MAX_ID + 32 };
#define LISTENER (1ULL << 63)

typedef struct {
    char id[MAX_ID];
    int id_length, token;
    uint64_t first_due_us;
} Request;

typedef struct Connection {
    int socket, length, num_requests;
    char *buffer;
    Request requests[MAX_REQUESTS];
    struct Connection *next;
} Connection;

typedef struct {
    int listener, length;
    char hello[MAX_HELLO];
} Replica;

static int num_tokens, first_token;
static long itl_us;
static Connection *connections;

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

static void send_frame(int socket, char *frame, char *end) {
    uint32_t length = end - frame - 4;
    memcpy(frame, &length, 4);
    write_all(socket, frame, length + 4);
}

static char *put(char *at, const char *data, int length) {
    memcpy(at, data, length);
    return at + length;
}

// The value behind a key of a message, where its msgpack type byte stands; NULL without that key.
static char *value_of(char *message, int length, const char *key) {
    char wanted[32];
    int size = strlen(key);
    wanted[0] = 0xa0 | size;
    memcpy(wanted + 1, key, size);
    char *found = memmem(message, length, wanted, size + 1);
    return found ? found + size + 1 : NULL;
}

static int read_id(char *value, char *id) {
    int length = (unsigned char)value[0] == 0xd9 ? (unsigned char)value[1] : value[0] & 0x1f;
    memcpy(id, value + ((unsigned char)value[0] == 0xd9 ? 2 : 1), length < MAX_ID ? length : MAX_ID);
    return length < MAX_ID ? length : MAX_ID;
}

static void answer_probe(Connection *connection, char *message, int length) {
    char *nonce = value_of(message, length, "nonce"), frame[128], *at = frame + 4;
    unsigned char kind = nonce ? nonce[0] : 0;
    at = put(at, "\x84\xa4type\xa6health\xa5nonce", 19);
    at = put(at, nonce ? nonce : "\0", kind == 0xcc ? 2 : kind == 0xcd ? 3 : kind == 0xce ? 5 : 1);
    at = put(at, "\xa8" "draining\xc2\xa5stats\x80", 17);
    send_frame(connection->socket, frame, at);
}

static void receive(Connection *connection, char *message, int length) {
    char *type = value_of(message, length < 64 ? length : 64, "type");
    if (!type) return;
    if (!memcmp(type, "\xa5probe", 6)) answer_probe(connection, message, length);
    char *id = value_of(message, length, "request_id");
    if (!id) return;
    if (!memcmp(type, "\xa6submit", 7) && connection->num_requests < MAX_REQUESTS) {
        Request *request = &connection->requests[connection->num_requests++];
        request->id_length = read_id(id, request->id);
        request->token = 0;
        request->first_due_us = now_us() + itl_us;
    } else if (!memcmp(type, "\xa5" "abort", 6)) {
        char wanted[MAX_ID];
        int size = read_id(id, wanted);
        for (int i = 0; i < connection->num_requests; i++)
            if (connection->requests[i].id_length == size && !memcmp(connection->requests[i].id, wanted, size))
                connection->requests[i] = connection->requests[--connection->num_requests];
    }
}

static int read_frames(Connection *connection) {
    int got = recv(connection->socket, connection->buffer + connection->length, CAPACITY - connection->length, 0);
    if (got < 0 && errno == EAGAIN) return 1;
    if (got <= 0) return 0;
    connection->length += got;
    int at = 0;
    uint32_t length;
    while (connection->length - at >= 4) {
        memcpy(&length, connection->buffer + at, 4);
        if (connection->length - at - 4 < (int)length) break;
        receive(connection, connection->buffer + at + 4, length);
        at += 4 + length;
    }
    memmove(connection->buffer, connection->buffer + at, connection->length - at);
    connection->length -= at;
    return connection->length < CAPACITY;
}

// Output is an array: id, sample, tokens, finish_reason, stop_token, cached tokens[, two logprobs, timing]
static char *put_output(char *at, Request *request) {
    int first = request->token == 0, last = request->token == num_tokens - 1;
    uint32_t token = first_token + request->token;
    *at++ = first ? 0x99 : 0x96;
    *at++ = 0xd9;
    *at++ = request->id_length;
    at = put(at, request->id, request->id_length);
    at = put(at, "\x00\x91\xce", 3);
    for (int shift = 24; shift >= 0; shift -= 8) *at++ = token >> shift;
    at = last ? put(at, "\xa6length", 7) : put(at, "\xc0", 1);
    at = put(at, "\xc0\x00", 2);
    return first ? put(at, "\xc0\xc0\x93\x00\x00\x01", 6) : at;
}

// One Step: first tokens that are due, or the next token of every request that has begun.
static void step(Connection *connection, uint64_t at_us, int first_tokens) {
    static char frame[MAX_REQUESTS * OUTPUT_BYTES + 64];
    int count = 0, left = 0;
    char *at = put(frame + 4, "\x84\xa4type\xa4step\xa7outputs\xdc", 20);
    char *count_at = at;
    at += 2;
    for (int i = 0; i < connection->num_requests; i++) {
        Request *request = &connection->requests[i];
        if (first_tokens ? request->token == 0 && request->first_due_us <= at_us : request->token > 0) {
            at = put_output(at, request);
            request->token++;
            count++;
        }
        if (request->token < num_tokens) connection->requests[left++] = *request;
    }
    connection->num_requests = left;
    if (!count) return;
    count_at[0] = count >> 8;
    count_at[1] = count;
    at = put(at, "\xa6" "failed\x90\xa5stats\x80", 15);
    send_frame(connection->socket, frame, at);
}

// When the next first token is due, or the common tick if that is sooner; 0 while nothing runs.
static uint64_t next_due(uint64_t tick_us) {
    uint64_t due_us = 0;
    for (Connection *connection = connections; connection; connection = connection->next)
        for (int i = 0; i < connection->num_requests; i++) {
            Request *request = &connection->requests[i];
            uint64_t own_us = request->token == 0 && request->first_due_us < tick_us ? request->first_due_us : tick_us;
            if (!due_us || own_us < due_us) due_us = own_us;
        }
    return due_us;
}

static int listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        fprintf(stderr, "%s: too long for a socket\n", path);
        exit(1);
    }
    strcpy(address.sun_path, path);
    unlink(path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 64)) {
        perror(path);
        exit(1);
    }
    return listener;
}

static void drop(Connection *connection) {
    for (Connection **at = &connections; *at; at = &(*at)->next)
        if (*at == connection) {
            *at = connection->next;
            break;
        }
    close(connection->socket);
    free(connection->buffer);
    free(connection);
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: replica ITL_US NUM_TOKENS FIRST_TOKEN_ID HELLO_FILE...\n");
        return 2;
    }
    itl_us = atol(argv[1]);
    num_tokens = atoi(argv[2]);
    first_token = atoi(argv[3]);
    int num_replicas = argc - 4, epoll_fd = epoll_create1(0);
    Replica *replicas = calloc(num_replicas, sizeof *replicas);
    for (int i = 0; i < num_replicas; i++) {
        char path[200];
        FILE *file = fopen(argv[4 + i], "rb");
        if (!file) {
            perror(argv[4 + i]);
            return 1;
        }
        replicas[i].length = fread(replicas[i].hello, 1, MAX_HELLO, file);
        fclose(file);
        snprintf(path, sizeof path, "%s.sock", argv[4 + i]);
        replicas[i].listener = listen_at(path);
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = LISTENER | i};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, replicas[i].listener, &event);
    }
    uint64_t tick_us = now_us() + itl_us;
    for (;;) {
        struct epoll_event events[64];
        uint64_t due_us = next_due(tick_us);
        int64_t wait_us = (int64_t)(due_us - now_us());
        if (wait_us < 0) wait_us = 0;
        struct timespec wait = {.tv_sec = wait_us / 1000000, .tv_nsec = wait_us % 1000000 * 1000};
        int count = epoll_pwait2(epoll_fd, events, 64, due_us ? &wait : NULL, NULL);
        for (int i = 0; i < count; i++) {
            if (!(events[i].data.u64 & LISTENER)) {
                if (!read_frames(events[i].data.ptr)) drop(events[i].data.ptr);
                continue;
            }
            Replica *replica = &replicas[events[i].data.u64 & 0xffff];
            int accepted = accept4(replica->listener, 0, 0, SOCK_NONBLOCK);
            if (accepted < 0) continue;
            Connection *connection = calloc(1, sizeof *connection);
            connection->socket = accepted;
            connection->buffer = malloc(CAPACITY);
            connection->next = connections;
            connections = connection;
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
            epoll_ctl(epoll_fd, EPOLL_CTL_ADD, accepted, &event);
            write_all(accepted, replica->hello, replica->length);
        }
        uint64_t at_us = now_us();
        for (Connection *connection = connections; connection; connection = connection->next) {
            step(connection, at_us, 1);
            if (at_us >= tick_us) step(connection, at_us, 0);
        }
        if (at_us >= tick_us) {
            tick_us += itl_us;
            if (tick_us < at_us) tick_us = at_us + itl_us;
        }
    }
}
