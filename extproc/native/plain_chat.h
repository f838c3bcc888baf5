/* Reads the bytes of a chat completion whose messages are plain, without making objects. */
#ifndef KVSTEER_PLAIN_CHAT_H
#define KVSTEER_PLAIN_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Longer conversations are read by the decoder. */
enum { MOST_PLAIN_MESSAGES = 1024 };

/* A content as it is written, between its quotes: the places of its first byte and behind it. */
typedef struct {
    uint64_t start, end;
} ContentSpan;

/* A word of ASCII without an escape; bytes is NULL if there is none, or null. */
typedef struct {
    const uint8_t *bytes;
    size_t length;
    bool is_there;
} PlainWord;

/* salt: of its cache. roles: of each message, the first letter. */
typedef struct {
    PlainWord model, salt;
    size_t count;
    uint8_t roles[MOST_PLAIN_MESSAGES];
    ContentSpan contents[MOST_PLAIN_MESSAGES];
} PlainChat;

/* Reads a body; false if it is none of these, or if that takes a decoder to know.
 *
 * What it accepts, a JSON decoder accepts as well if it accepts the contents; nothing is known of
 * the escapes and the encoding of those.
 *
 * limited: the names of members that may have certain values only, up to a zero; each behind its
 * length, and followed by those values as they are written, behind their lengths, up to a zero. */
bool plain_chat_read(const uint8_t *body, size_t length, const uint8_t *limited,
                     PlainChat *chat);

#endif
