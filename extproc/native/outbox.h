/* What the parts of a connection need of each other. */
#ifndef KVSTEER_OUTBOX_H
#define KVSTEER_OUTBOX_H

#include "connection.h"

Stream *table_add(StreamTable *table, uint32_t id);
void table_free(StreamTable *table);

/* Queue frames that no window holds back. */
void outbox_frame(Connection *connection, uint8_t kind, uint8_t flags, uint32_t stream_id,
                  const uint8_t *payload, size_t length);
void outbox_number(Connection *connection, uint8_t kind, uint32_t stream_id, uint32_t number);
void outbox_goaway(Connection *connection, uint32_t code, const char *text);

/* Sends DATA now or as windows allow; false if there is no room to keep it. */
bool outbox_send(Connection *connection, Stream *stream, const uint8_t *prefix,
                 size_t prefix_length, const uint8_t *data, size_t length);

/* Sends DATA as windows allow, of which the loan is not copied; false if there is no room to keep it:
 * then the loan is not ended. */
bool outbox_lend(Connection *connection, Stream *stream, Text before, Loan loan, Text behind);

/* Drops the waiting data of an ended stream. */
void outbox_forget(Connection *connection, Stream *stream);

/* Sends the trailers, or the end of an answer without any, unless DATA waits; returns whether it
 * did. */
bool outbox_end(Connection *connection, Stream *stream);

/* Takes a stream's WINDOW_UPDATE; false if its window becomes too large. */
bool outbox_grant(Connection *connection, Stream *stream, uint32_t increment);
void outbox_set_initial_window(Connection *connection, uint32_t size);

/* Closes a stream whose answer has ended. */
void connection_finish(Connection *connection, Stream *stream);

#endif
