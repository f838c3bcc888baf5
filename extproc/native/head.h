/* The header list of a request, as far as the server reads it. */
#ifndef KVSTEER_HEAD_H
#define KVSTEER_HEAD_H

#include "hpack.h"

typedef enum { GRPC_CALL, WRONG_METHOD, WRONG_TYPE, COMPRESSED } RequestKind;

/* is_malformed: RFC 9113, section 8.1.1. is_request: it has all fields of a request (8.3.1).
 * is_trailers: it has no pseudo-header. Its texts are copies in `texts`, by offset and length. */
typedef struct {
    bool is_malformed, is_regular, is_trailers, is_request, has_length;
    uint8_t seen; /* the pseudo-headers so far, by bit */
    bool is_post, is_head, is_grpc, is_compressed;
    uint64_t content_length;
    size_t path_at, path_length, trace_at, trace_length;
    Buffer *texts;
} Head;

void head_begin(Head *head, Buffer *texts);

/* Takes the next field; a FieldTaker. */
void head_take(void *head, Text name, Text value);

/* Completes a head, once all fields were taken. */
void head_end(Head *head);

RequestKind head_kind(const Head *head);

#endif
