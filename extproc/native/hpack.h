/* Decodes header blocks (RFC 7541) with a dynamic table of at most 4,096 bytes. */
#ifndef KVSTEER_HPACK_H
#define KVSTEER_HPACK_H

#include "buffer.h"

#define DEFAULT_TABLE_BYTES 4096u
#define FIELD_BYTES 32u /* the size of a field besides its bytes (sections 4.1 and RFC 9113, 6.5.2) */
#define MAX_TABLE_FIELDS (DEFAULT_TABLE_BYTES / FIELD_BYTES)

/* A string that is another's part. */
typedef struct {
    const uint8_t *bytes;
    size_t length;
} Text;

typedef struct {
    uint8_t *bytes; /* the name, then the value */
    size_t name_length, value_length;
} TableField;

typedef struct {
    TableField fields[MAX_TABLE_FIELDS]; /* a ring */
    uint32_t newest, count;
    size_t used_bytes, max_bytes; /* max_bytes: as the peer has set it */
    size_t allowed_bytes;         /* the most that the peer may set */
    bool owes_size;               /* the next block has to begin with a table size */
    size_t max_list_bytes;
    Buffer name, value; /* decoded Huffman codes of the present field */
} Hpack;

typedef enum { HPACK_DONE, HPACK_MALFORMED, HPACK_TOO_LARGE, HPACK_TOO_MANY_SIZES } HpackResult;

/* Gets each field in turn; the texts are valid during the call. */
typedef void (*FieldTaker)(void *taker, Text name, Text value);

void hpack_init(Hpack *hpack, size_t max_list_bytes);
void hpack_free(Hpack *hpack);

/* Allows no table from now on (RFC 9113, section 4.3.1): the peer has acknowledged a size of 0. */
void hpack_forbid_table(Hpack *hpack);

/* After any other result than HPACK_DONE the decoder must not be used again. */
HpackResult hpack_decode(Hpack *hpack, const uint8_t *block, size_t length, FieldTaker take,
                         void *taker);

/* Whether equal blocks mean the same from now on: there is no table, and this block sets no size. */
bool hpack_is_stateless(const Hpack *hpack, const uint8_t *block, size_t length);

/* Adds a field as a literal without indexing (section 6.2.2), valid in any state. */
void hpack_encode(Buffer *block, const char *name, const uint8_t *value, size_t value_length);

#endif
